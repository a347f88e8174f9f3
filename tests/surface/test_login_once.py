"""A wrong password is tried exactly once, whatever the product does: HANA locks users. The emulator counts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hana_emulator.testing import Emulator, running
from tests.forked import owl_sap
from tests.surface.conftest import ROOT, environment

pytest.importorskip("hdbcli")

Cli = Callable[..., Any]
COLLECTION = """
[[collections]]
name = "rows"
source = "SAPDEMO.T"
template = "{TEXT}"
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator with a table and a user who may read it and owns a schema for vectors."""
    with running("--data", str(tmp_path_factory.mktemp("house"))) as emulator:
        run(
            emulator,
            "CREATE TABLE T (K INTEGER PRIMARY KEY, TEXT NVARCHAR(50))",
            "INSERT INTO T VALUES (1, 'a pump')",
        )
        yield emulator
        assert emulator.stop() == 0


@pytest.fixture
def guest(house: Emulator, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new user, so that the counts begin at zero."""
    name = f"GUEST_{abs(hash(request.node.nodeid)) % 10**9}"
    run(house, f'CREATE USER {name} PASSWORD "Right-1" NO FORCE_FIRST_PASSWORD_CHANGE', f"GRANT SELECT ON T TO {name}")
    yield name
    run(house, f"DROP USER {name} CASCADE")


def run(emulator: Emulator, *statements: str) -> list[tuple[Any, ...]]:
    with closing(emulator.connect(autocommit=True)) as connection:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []


def counted(emulator: Emulator, user: str) -> tuple[int, int]:
    """Attempts and failures."""
    sql = f"SELECT ATTEMPTS, FAILURES FROM SYS.M_EMULATOR_LOGINS WHERE USER_NAME = '{user}'"
    found = run(emulator, sql)
    return (found[0][0], found[0][1]) if found else (0, 0)


def variables(emulator: Emulator, user: str, password: str) -> dict[str, str]:
    return {
        "HANA_HOST": emulator.host,
        "HANA_PORT": str(emulator.port),
        "HANA_ENCRYPT": "false",
        "HANA_USER": user,
        "HANA_PASSWORD": password,
        "OWL_SAP_STORE__SCHEMA": user,
        "OWL_SAP_EMBEDDING__MODEL": "hash:16",
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["sync", "rows"], 3),
        (["sync", "--all"], 3),
        (["search", "rows", "pump"], 3),
        (["verify", "rows"], 3),
        (["status"], 3),
        (["doctor"], 1),
    ],
)
@pytest.mark.parametrize("collections", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.proves(7)
def test_the_command_line_tries_once(
    cli: Cli, tmp_path: Path, house: Emulator, guest: str, arguments: list[str], code: int, collections: int
) -> None:
    blocks = [COLLECTION.replace('"rows"', f'"rows{number or ""}"') for number in range(collections)]
    (tmp_path / "owl-sap.toml").write_text("".join(blocks))
    ended = cli(*arguments, **variables(house, guest, "canary-11"))
    assert ended.code == code, ended.err
    assert "login refused" in ended.err + " ".join(ended.out.split())
    assert "canary-11" not in ended.err + ended.out
    assert counted(house, guest) == (1, 1)


def test_the_right_password_is_counted_too(here: Cli, tmp_path: Path, house: Emulator, guest: str) -> None:
    """Else the test above could not fail."""
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    assert here("sync", "rows", **variables(house, guest, "Right-1")).code == 0
    attempts, failures = counted(house, guest)
    assert (attempts > 0, failures) == (True, 0)


@contextmanager
def served(folder: Path, settings: dict[str, str]) -> Iterator[str]:
    with owl_sap(
        "serve",
        "--port",
        "0",
        cwd=folder,
        env=environment(**settings) | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@pytest.mark.proves(7)
def test_the_service_tries_once_however_often_it_is_asked(tmp_path: Path, house: Emulator, guest: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    with served(tmp_path, variables(house, guest, "canary-12")) as url:
        for _ in range(5):
            ready = httpx.get(f"{url}/health/ready", timeout=30)
            assert (ready.status_code, "canary-12" in ready.text) == (503, False)
        for _ in range(3):
            found = httpx.post(f"{url}/v1/collections/rows/search", json={"query": "pump"}, timeout=30)
            assert found.status_code == 503
        assert httpx.get(f"{url}/health/live", timeout=30).status_code == 200
    assert counted(house, guest) == (1, 1)


def test_a_job_tries_again_only_when_somebody_says_so(tmp_path: Path, house: Emulator, guest: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    run(house, f"ALTER USER {guest} DEACTIVATE USER NOW")

    def synced(client: httpx.Client, **body: bool) -> tuple[str, str]:
        job = client.post("/v1/collections/rows/sync", json=body).json()["job"]
        while (record := client.get(f"/v1/jobs/{job}").json())["finished"] is None:
            time.sleep(0.02)
        return record["state"], record["error"] or ""

    with (
        served(tmp_path, variables(house, guest, "Right-1")) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for _ in range(2):
            state, error = synced(client)
            assert (state, "deactivated" in error) == ("failed", True)
        assert counted(house, guest) == (1, 1)
        assert synced(client, retry_login=True)[0] == "failed"
        assert counted(house, guest) == (2, 2), "one more attempt, and only one"
        run(house, f"ALTER USER {guest} ACTIVATE USER NOW")
        assert synced(client)[0] == "failed"
        assert counted(house, guest) == (2, 2)
        assert synced(client, retry_login=True) == ("succeeded", "")


def test_a_locked_user_is_told_what_to_do(here: Cli, tmp_path: Path, house: Emulator, guest: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    for _ in range(6):
        assert here("sync", "rows", **variables(house, guest, "wrong")).code == 3
    locked = here("sync", "rows", **variables(house, guest, "Right-1"))
    assert (locked.code, "RESET CONNECT ATTEMPTS" in locked.err) == (3, True)
    run(house, f"ALTER USER {guest} RESET CONNECT ATTEMPTS")
    assert here("sync", "rows", **variables(house, guest, "Right-1")).code == 0


@pytest.mark.proves(7)
def test_a_missing_privilege_is_named(here: Cli, tmp_path: Path, house: Emulator, guest: str) -> None:
    run(house, f"GRANT INSERT ON T TO {guest}", f"REVOKE SELECT ON T FROM {guest}")
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    login = variables(house, guest, "Right-1")
    refused = here("sync", "rows", **login)
    assert refused.code == 3
    assert "SELECT on SAPDEMO.T" in " ".join(refused.err.split())
    assert f'Ask an administrator to run: GRANT SELECT ON "SAPDEMO"."T" TO "{guest}"' in " ".join(refused.err.split())
    checks = {check["check"]: check for check in here("doctor", "--json", **login).json}
    assert not checks["table of rows"]["ok"]
    assert "GRANT SELECT" in checks["table of rows"]["detail"] + checks["table of rows"]["fix"]


def test_a_table_that_the_user_may_not_even_see(here: Cli, tmp_path: Path, house: Emulator, guest: str) -> None:
    """HANA hides it from the catalogue, so it looks as if it were not there."""
    run(house, f"REVOKE SELECT ON T FROM {guest}")
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    refused = here("sync", "rows", **variables(house, guest, "Right-1"))
    assert (refused.code, "that this user can see" in " ".join(refused.err.split())) == (2, True)
    assert "`owl-sap grants` prints the GRANT" in " ".join(refused.err.split())


def test_a_schema_one_may_not_write_in_is_named(here: Cli, tmp_path: Path, house: Emulator, guest: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    elsewhere = variables(house, guest, "Right-1") | {"OWL_SAP_STORE__SCHEMA": "SAPDEMO"}
    checks = {check["check"]: check for check in here("doctor", "--json", **elsewhere).json}
    assert not checks["store writable"]["ok"]
    refused = here("sync", "rows", **elsewhere)
    assert f'GRANT CREATE ANY ON SCHEMA "SAPDEMO" TO "{guest}"' in " ".join(refused.err.split())
    run(house, f"GRANT CREATE ANY ON SCHEMA SAPDEMO TO {guest}")
    assert here("doctor", **elsewhere).code == 0
    assert here("sync", "rows", **elsewhere).code == 0
    assert here("search", "rows", "pump", "--json", **elsewhere).json[0]["key"] == {"K": 1}
