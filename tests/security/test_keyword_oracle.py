"""An attack: a caller who may see one row reads others out by the scores and the order of keyword and hybrid search.
Over the service as REST offers it, with each kind of store.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.src.access.principal import LOOPBACK, Principal
from app.src.service.search import Mode, SearchOptions
from app.src.service.service import Service
from app.src.settings import Settings
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.stores.hana.store import HanaStore
from tests.api.conftest import TableSource, settings_in

pytestmark = pytest.mark.slow

NAMES = ["Mueller", "Schmidt", "Becker", "Wagner", "Hoffmann", "Schulz", "Koch", "Richter", "Klein", "Wolf"]
CANDIDATES = [str(salary) for salary in range(81_000, 93_000, 1_000)]
SALARIES = dict(zip(NAMES, random.Random(4).sample(CANDIDATES, len(NAMES)), strict=True))
"""What is to be found out."""
ATTACKER = Principal("attacker", LOOPBACK.scopes, {"owner": ["MINE"]})


def settings(folder: Path) -> Settings:
    base = settings_in(folder)
    people, board = (each.model_dump() for each in base.collections)
    blocks = [people | {"row_rights": {"MTART": "owner"}}, board]
    return Settings.model_validate(base.model_dump(by_alias=True) | {"collections": blocks})


def rows(texts: list[str], owner: str) -> dict[str, dict[str, Any]]:
    keys = [f"{owner}{at:03}" for at in range(len(texts))]
    return {key: {"MATNR": key, "MAKTX": text, "MTART": owner} for key, text in zip(keys, texts, strict=True)}


@pytest.fixture(params=["local", "hana"], scope="module")
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, emulator: Any
) -> Iterator[Service]:
    source = TableSource()
    with ExitStack() as stack:
        store = None
        if request.param == "hana":
            connection = emulator.connect(autocommit=True)
            stack.callback(connection.close)
            connection.cursor().execute('CREATE SCHEMA "ORACLE"')
            stack.callback(connection.cursor().execute, 'DROP SCHEMA "ORACLE" CASCADE')
            login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
            store = HanaStore(
                stack.enter_context(HanaPool(ConnectionOptions(**login, encrypt=False), size=2)), "ORACLE"
            )
        service = Service(settings(tmp_path_factory.mktemp("oracle")), source=source, store=store)
        stack.callback(service.close)
        mine = [" ".join([*NAMES, *CANDIDATES]), *(f"{name}-salary-{each}" for name in NAMES for each in CANDIDATES)]
        hidden = [f"{name} {salary}" for name, salary in SALARIES.items()]
        hidden += [f"{name}-salary-{salary}" for name, salary in SALARIES.items()]
        source.rows_by_key = rows(mine, "MINE") | rows(hidden, "OTHERS")
        service.sync.run("materials")
        source.rows_by_key = rows(mine, "MINE")
        service.sync.run("never")
        yield service


def recovered(query: Callable[[str, str], str], seen: Callable[[str], Hashable]) -> int:
    """How many salaries are read out: of each name the only candidate whose answer no other one has."""
    right = 0
    for name in NAMES:
        answers = {salary: seen(query(name, salary)) for salary in CANDIDATES}
        counts = Counter(answers.values())
        unlike = [salary for salary, answer in answers.items() if counts[answer] == 1]
        right += unlike == [SALARIES[name]]
    return right


@pytest.mark.parametrize("collection", ["materials", "never"])
@pytest.mark.parametrize("mode", ["keyword", "hybrid"])
@pytest.mark.parametrize(
    "query",
    [lambda name, salary: f"{name} {salary}", lambda name, salary: f"{name}-salary-{salary}"],
    ids=["two words", "phrase"],
)
def test_no_hidden_value_is_read_out(
    service: Service, collection: str, mode: Mode, query: Callable[[str, str], str]
) -> None:
    def seen(text: str) -> Hashable:
        """Scores, and their order. What differs with the text alone is left out: which row holds the words, and in
        hybrid all but the keyword ranking."""
        options = SearchOptions(mode, explain=True)
        found = service.search.run(collection, text, 200, None, options, principal=ATTACKER)
        assert found.hits
        assert found.explain is not None
        assert found.explain["rankings"]["keyword"]
        assert all(hit.metadata["MTART"] == "MINE" for hit in found.hits)
        if mode == "keyword":
            return tuple((len(hit.text), round(hit.score, 9)) for hit in found.hits)
        told = [hit["keyword"] and tuple(hit["keyword"].values()) for hit in found.explain["hits"]]
        return tuple(sorted(each for each in told if each)), tuple(sorted(found.explain["rankings"].items()))

    assert recovered(query, seen) == 0
