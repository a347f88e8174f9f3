"""Recorded sessions of hdbcli, damaged at random, against the whole emulator: it lives, answers everybody else, keeps
nothing open and commits nothing that no client asked for.

A failing example is printed by hypothesis with its damage; `@reproduce_failure` or the example itself replays it.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emulator_wire import HANDSHAKE, Proof, fields, request_packet
from hana_emulator.testing import running
from tests.fuzz import packets, recordings
from tests.fuzz.packets import COMMIT_AT, Change, changes, damaged, damages, may_commit
from tests.fuzz.served import Target, attacked, converse

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and files under /proc")
ATTACK = settings(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
LONGER = settings(ATTACK, max_examples=60)
LONG = settings(ATTACK, max_examples=500)
names = st.sampled_from(sorted(recordings.SESSIONS))
mixtures = st.lists(st.tuples(names, st.integers(0, 50)), min_size=2, max_size=12)


class Attacked:
    """No dataclass: hypothesis would print megabytes of packets."""

    def __init__(self, target: Target, recorded: dict[str, list[bytes]]) -> None:
        self.target = target
        self.recorded = recorded
        self.known = recordings.commands(recorded)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    with running() as emulator:
        recordings.create_tables(emulator)
        return recordings.record(emulator, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
def attack(
    request: pytest.FixtureRequest, recorded: dict[str, list[bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    arguments = ["--tls"] if request.param == "tls" else []
    with attacked(tmp_path_factory.mktemp("attacked"), *arguments) as target:
        recordings.create_tables(target.emulator)
        for session in recorded.values():  # all code has run once
            client = target.login()
            with client.socket:
                converse(client, session)
        target.rests()
        yield Attacked(target, recorded)


def fight(attack: Attacked, session: list[bytes]) -> None:
    """One client sends a session that may be anything; then all must be as it was. Rows that it rightly committed, by a
    flag or statement of the damage, are deleted."""
    target = attack.target
    before = target.committed()
    client = target.login()
    with client.socket:
        whole = converse(client, session)
    target.check_alive()
    target.check_settled()
    if not any(may_commit(request, attack.known) for request in whole):
        assert target.committed() == before, "something was committed that nobody committed"
    target.restore()


def test_undamaged_sessions_leave_nothing_behind(attack: Attacked) -> None:
    """What the other tests rely on: a replay is answered like the recording, packet by packet."""
    for session in attack.recorded.values():
        client = attack.target.login()
        with client.socket:
            assert len(converse(client, session)) == len(session)
        attack.target.check_settled()
    assert attack.target.committed() == [(1, -1, "untouched")]


def test_rows_of_a_session_damaged_to_commit_are_deleted(attack: Attacked) -> None:
    session = attack.recorded["types"]
    fight(attack, damaged(session, [("flip", packet, COMMIT_AT, 1) for packet in range(len(session))]))
    assert attack.target.committed() == [(1, -1, "untouched")]


@ATTACK
@given(name=names, damage=damages)
def test_damaged_sessions(attack: Attacked, name: str, damage: list[Change]) -> None:
    fight(attack, damaged(attack.recorded[name], damage))


@ATTACK
@given(order=mixtures, damage=st.lists(changes, max_size=2))
def test_packets_of_all_sessions_in_any_order(
    attack: Attacked, order: list[tuple[str, int]], damage: list[Change]
) -> None:
    mixed = [attack.recorded[name][place % len(attack.recorded[name])] for name, place in order]
    fight(attack, damaged(mixed, damage))


@pytest.mark.slow
@LONG
@given(name=names, damage=damages)
def test_damaged_sessions_for_minutes(attack: Attacked, name: str, damage: list[Change]) -> None:
    fight(attack, damaged(attack.recorded[name], damage))


def test_memory_comes_back(attack: Attacked) -> None:
    """After whatever ran before on this server: damaged lengths must not have made it keep what they promised."""
    for session in attack.recorded.values():
        client = attack.target.login()
        with client.socket:
            converse(client, session[:-2])
    attack.target.check_settled()
    attack.target.check_memory(150)


# -------------------------------------------------------------------------------------------------------------- login


strangers = st.sampled_from([b"GHOST", b"", b"\xff" * 40, b'"', b"\xed\xa0\xbd"])


@ATTACK
@given(damage=damages, user=strangers)
def test_damaged_logins(attack: Attacked, damage: list[Change], user: bytes) -> None:
    knock(attack, damage, user)


@pytest.mark.slow
@LONGER
@given(damage=damages, user=strangers)
def test_more_damaged_logins(attack: Attacked, damage: list[Change], user: bytes) -> None:
    knock(attack, damage, user)


def knock(attack: Attacked, damage: list[Change], user: bytes) -> None:
    """Of users that do not exist: too many failures would lock one that does."""
    first = fields(user, b"SCRAMPBKDF2SHA256", bytes(64), b"SCRAMSHA256", Proof("wrong").challenge)
    second = fields(user, b"SCRAMPBKDF2SHA256", fields(bytes(32)))
    login = [
        HANDSHAKE,
        request_packet(packets.AUTHENTICATE, [(33, 1, first)]),
        request_packet(packets.CONNECT, [(33, 1, second), (42, 1, b"\x01\x03\x01\0\0\0")]),
        request_packet(packets.EXECUTE_DIRECT, [(3, 1, b"SELECT 1 FROM DUMMY")]),
    ]
    with contextlib.suppress(OSError), attack.target.socket() as sock:
        for packet in damaged(login, damage):
            sock.sendall(packet)
        if not isinstance(sock, ssl.SSLSocket):
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    attack.target.check_alive()
    attack.target.check_settled()


# ------------------------------------------------------------------------------------------------------- many at once


def _silent(target: Target, _chance: random.Random) -> socket.socket:
    return target.socket()


def _half_a_handshake(target: Target, chance: random.Random) -> socket.socket:
    sock = target.socket()
    sock.sendall(HANDSHAKE[: chance.randrange(len(HANDSHAKE))])
    return sock


def _promises_much(target: Target, _chance: random.Random) -> socket.socket:
    """A header of a packet of 256 MB, which never comes."""
    sock = target.socket()
    sock.sendall(HANDSHAKE + struct.pack("<qiIIhBxI4x", 0, 0, 256 << 20, 1 << 20, 1, 0, 0))
    return sock


def _half_a_packet(target: Target, chance: random.Random) -> socket.socket:
    client = target.login()
    packet = request_packet(packets.EXECUTE_DIRECT, [(3, 1, b"SELECT 1 FROM DUMMY")])
    client.socket.sendall(packet[: chance.randrange(len(packet))])
    return client.socket


def _open_transaction(target: Target, chance: random.Random) -> socket.socket:
    client = target.login()
    assert client.execute(f"INSERT INTO FUZZED (K, N) VALUES ({chance.randrange(2**30)}, 'zz')").kind != 5
    return client.socket


def _open_result(target: Target, _chance: random.Random) -> socket.socket:
    client = target.login()
    assert client.execute("SELECT A.N FROM NUMBERS A, NUMBERS B").kind != 5
    return client.socket


def _never_reads(target: Target, _chance: random.Random) -> socket.socket:
    """Asks for more than the socket's buffers hold."""
    client = target.login()
    question = request_packet(packets.EXECUTE_DIRECT, [(3, 1, b"SELECT A.N, B.N FROM NUMBERS A, NUMBERS B")])
    for _ in range(20):
        client.socket.sendall(question)
    return client.socket


def _busy(target: Target, _chance: random.Random) -> socket.socket:
    client = target.login()
    numbers = ", ".join(f"NUMBERS N{number}" for number in range(8))
    client.send(packets.EXECUTE_DIRECT, (3, 1, f"SELECT COUNT(*) FROM {numbers}".encode()))
    return client.socket


KINDS: list[Callable[[Target, random.Random], socket.socket]] = [
    *(_silent, _half_a_handshake, _promises_much, _half_a_packet, _open_transaction, _open_result, _never_reads, _busy)
]


@pytest.mark.parametrize("of_each", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_many_clients_that_leave_all_at_once(attack: Attacked, of_each: int) -> None:
    chance, target = random.Random(1), attack.target
    with contextlib.ExitStack() as stack:
        kinds = [*KINDS * of_each, *[_silent] * 30]
        chance.shuffle(kinds)
        for kind in kinds:
            stack.enter_context(kind(target, chance))
        target.check_alive()
        assert target.rss() - target.memory < 600 << 20, "memory is taken for packets that never came"
    target.check_settled()
    target.check_alive()
    assert target.committed() == [(1, -1, "untouched")]


def test_dozens_of_connections(attack: Attacked) -> None:
    """One after another, some closed by a reset."""
    reset = struct.pack("ii", 1, 0)
    for number in range(60):
        with socket.create_connection((attack.target.emulator.host, attack.target.emulator.port)) as sock:
            sock.sendall(HANDSHAKE[: number % 15])
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    attack.target.check_alive()
    attack.target.check_settled()
