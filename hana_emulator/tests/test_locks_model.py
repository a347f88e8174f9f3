"""Interleaved sessions of the emulator against a simple model of row locks, statement by statement.

The lock timeout is 0: a statement that would wait gets 131 and loses its transaction, so one thread can play them all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulator_sql import USER, Sql, open_database
from hana_emulator.errors import HanaError

SESSIONS = 3
Entry = tuple[int, str]
"""Which row it is (a number that stays with it), and its name."""
Content = dict[int, Entry]
NUMBER = st.integers(0, SESSIONS - 1)
KEY = st.integers(1, 6)
NAME = st.text("xy", max_size=3)


@dataclass
class Actor:
    """One session: what it sees while its transaction is open, the committed rows it has locked, its savepoints."""

    sql: Sql
    own: Content | None = None
    locked: set[int] = field(default_factory=set)
    savepoints: list[tuple[str, Content]] = field(default_factory=list)

    def end(self) -> None:
        self.own, self.locked, self.savepoints = None, set(), []


class RowLocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.database = open_database(lock_timeout=0.0)
        self.actors = [Actor(Sql(self.database.connect(USER), autocommit=False)) for _ in range(SESSIONS)]
        self.actors[0].sql.run("CREATE TABLE T (K INTEGER PRIMARY KEY, N NVARCHAR(3))")
        self.committed: Content = {}
        self.rows = itertools.count()

    def teardown(self) -> None:
        self.database.close()

    # --- the model

    def seen(self, actor: Actor) -> Content:
        return self.committed if actor.own is None else actor.own

    def base(self) -> set[int]:
        return {row for row, _ in self.committed.values()}

    def others(self, actor: Actor) -> list[Actor]:
        return [other for other in self.actors if other is not actor and other.own is not None]

    def new_keys(self, other: Actor) -> set[int]:
        """Keys of rows that only `other` knows, now or at one of its savepoints."""
        states = [other.own or {}, *(content for _, content in other.savepoints)]
        return {key for content in states for key, (row, _) in content.items() if row not in self.base()}

    def vacated(self, other: Actor) -> set[int]:
        kept = {row for row, _ in (other.own or {}).values()}
        return {key for key, (row, _) in self.committed.items() if row in other.locked and row not in kept}

    def is_locked(self, actor: Actor, rows: set[int]) -> bool:
        return any(rows & other.locked for other in self.others(actor))

    def insert_outcome(self, actor: Actor, keys: list[int]) -> int:
        """0: done; 301, 131."""

        def clashes(free: set[int]) -> bool:
            present = self.seen(actor).keys() - free
            return len(set(keys)) < len(keys) or not present.isdisjoint(keys)

        others = self.others(actor)
        if clashes(set()):
            return 131 if any(not clashes(self.vacated(o)) for o in others if self.vacated(o)) else 301
        return 131 if any(self.new_keys(other) & set(keys) for other in others) else 0

    # --- what is done to both

    def write(self, actor: Actor, outcome: int, text: str, rows: list[tuple[object, ...]], after: Content) -> None:
        if outcome:
            with pytest.raises(HanaError) as caught:
                actor.sql.many(text, rows)
            assert caught.value.code == outcome
            if outcome == 131:
                actor.end()
            return
        actor.sql.many(text, rows)
        base, before = self.base(), self.seen(actor)
        changed = {row for key, (row, name) in before.items() if after.get(key) != (row, name)}
        actor.locked |= changed & base
        actor.own = after

    @rule(number=NUMBER, keys=st.lists(KEY, min_size=1, max_size=3), name=NAME)
    def insert(self, number: int, keys: list[int], name: str) -> None:
        actor = self.actors[number]
        after = {**self.seen(actor), **{key: (next(self.rows), name) for key in keys}}
        rows: list[tuple[object, ...]] = [(key, name) for key in keys]
        self.write(actor, self.insert_outcome(actor, keys), "INSERT INTO T VALUES (?, ?)", rows, after)

    @rule(number=NUMBER, key=KEY, name=NAME)
    def upsert(self, number: int, key: int, name: str) -> None:
        actor = self.actors[number]
        before = self.seen(actor)
        if key in before:
            row = before[key][0]
            outcome = 131 if self.is_locked(actor, {row}) else 0
            actor.locked |= set() if outcome else {row} & self.base()
        else:
            row, outcome = next(self.rows), self.insert_outcome(actor, [key])
        after = {**before, key: (row, name)}
        self.write(actor, outcome, "UPSERT T VALUES (?, ?) WITH PRIMARY KEY", [(key, name)], after)

    @rule(number=NUMBER, low=KEY, high=KEY, name=NAME)
    def update(self, number: int, low: int, high: int, name: str) -> None:
        actor = self.actors[number]
        before = self.seen(actor)
        rows = {row for key, (row, _) in before.items() if low <= key <= high}
        after = {key: (row, name if row in rows else old) for key, (row, old) in before.items()}
        outcome = 131 if self.is_locked(actor, rows) else 0
        actor.locked |= set() if outcome else rows & self.base()
        self.write(actor, outcome, "UPDATE T SET N = ? WHERE K BETWEEN ? AND ?", [(name, low, high)], after)

    @rule(number=NUMBER, low=KEY, high=KEY)
    def delete(self, number: int, low: int, high: int) -> None:
        actor = self.actors[number]
        before = self.seen(actor)
        rows = {row for key, (row, _) in before.items() if low <= key <= high}
        after = {key: entry for key, entry in before.items() if entry[0] not in rows}
        outcome = 131 if self.is_locked(actor, rows) else 0
        self.write(actor, outcome, "DELETE FROM T WHERE K BETWEEN ? AND ?", [(low, high)], after)

    @rule(number=NUMBER, low=KEY, high=KEY, skipping=st.booleans())
    def select_for_update(self, number: int, low: int, high: int, skipping: bool) -> None:
        actor = self.actors[number]
        found = {key: row for key, (row, _) in self.seen(actor).items() if low <= key <= high}
        if skipping:
            found = {key: row for key, row in found.items() if not self.is_locked(actor, {row})}
        clause = "IGNORE LOCKED" if skipping else "NOWAIT"
        text = f"SELECT K FROM T WHERE K BETWEEN ? AND ? ORDER BY K FOR UPDATE {clause}"
        if self.is_locked(actor, set(found.values())):
            assert actor.sql.code(text, low, high) == 146
            return
        assert actor.sql.column(text, low, high) == sorted(found)
        actor.own = self.seen(actor)
        actor.locked |= set(found.values()) & self.base()

    @rule(number=NUMBER)
    def commit(self, number: int) -> None:
        """READ COMMITTED: the others, whatever they have open, see it at once beside what they have changed."""
        actor = self.actors[number]
        actor.sql.session.commit()
        if actor.own is not None:
            others = self.others(actor)
            kept = [(other, self.mine(other, other.own or {}), self.marks(other)) for other in others]
            self.committed = {**self.unlocked(actor), **self.mine(actor, actor.own)}
            for other, mine, marks in kept:
                unlocked = self.unlocked(other)
                other.own = {**unlocked, **mine}
                other.savepoints = [(name, {**unlocked, **content}) for name, content in marks]
        actor.end()

    def unlocked(self, actor: Actor) -> Content:
        return {key: entry for key, entry in self.committed.items() if entry[0] not in actor.locked}

    def mine(self, actor: Actor, content: Content) -> Content:
        """The rows that are as `actor` has made them."""
        base = self.base()
        return {key: entry for key, entry in content.items() if entry[0] in actor.locked or entry[0] not in base}

    def marks(self, actor: Actor) -> list[tuple[str, Content]]:
        return [(name, self.mine(actor, content)) for name, content in actor.savepoints]

    @rule(number=NUMBER)
    def rollback(self, number: int) -> None:
        self.actors[number].sql.run("ROLLBACK")
        self.actors[number].end()

    @rule(number=NUMBER, name=st.sampled_from(["A", "B"]))
    def savepoint(self, number: int, name: str) -> None:
        actor = self.actors[number]
        actor.sql.run(f"SAVEPOINT {name}")
        actor.own = self.seen(actor)
        actor.savepoints.append((name, actor.own))

    @precondition(lambda self: any(actor.savepoints for actor in self.actors))
    @rule(number=NUMBER, name=st.sampled_from(["A", "B"]), releasing=st.booleans())
    def end_savepoint(self, number: int, name: str, releasing: bool) -> None:
        actor = self.actors[number]
        text = f"{'RELEASE' if releasing else 'ROLLBACK TO'} SAVEPOINT {name}"
        places = [place for place, (known, _) in enumerate(actor.savepoints) if known == name]
        if not places:
            assert actor.sql.code(text) == 128
            return
        actor.sql.run(text)
        if releasing:
            del actor.savepoints[places[-1] :]
        else:
            del actor.savepoints[places[-1] + 1 :]
            actor.own = actor.savepoints[-1][1]

    @invariant()
    def everybody_sees_what_they_should(self) -> None:
        for actor in self.actors:
            found = dict(actor.sql.rows("SELECT K, N FROM T"))
            assert found == {key: name for key, (_, name) in self.seen(actor).items()}
            assert actor.sql.session.in_transaction == (actor.own is not None)


TestRowLocks = RowLocks.TestCase
TestRowLocks.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
