"""`owl-sap init` as a person runs it: flags, questions on a terminal, the template without a database; and that what it
wrote works with the verbs that follow.
"""

from __future__ import annotations

import os
import pty
import re
import select
import termios
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from app.src.cli.application import guarded
from app.src.settings import load
from hana_emulator.testing import Emulator
from tests.forked import owl_sap
from tests.surface.conftest import Cli, environment

FILE, VARIABLES = "owl-sap.toml", ".env.example"
HASHING = {"OWL_SAP_EMBEDDING__MODEL": "hash:64"}


@pytest.fixture
def where(sample: Emulator) -> list[str]:
    return ["--host", sample.host, "--port", str(sample.port), "--user", sample.user, "--no-encrypt"]


@pytest.fixture
def password(sample: Emulator) -> dict[str, str]:
    return {"HANA_PASSWORD": sample.password} | HASHING


@contextmanager
def beside(sample: Emulator, schema: str, *statements: str) -> Iterator[None]:
    """A schema beside that of the sample, gone afterwards: to other tests that is the only one."""
    with closing(sample.connect(autocommit=True)) as hana, closing(hana.cursor()) as cursor:
        for statement in (f"CREATE SCHEMA {schema}", *statements):
            cursor.execute(statement)
        try:
            yield
        finally:
            cursor.execute(f"DROP SCHEMA {schema} CASCADE")


def written(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / FILE).read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------- with flags


@pytest.mark.parametrize("store", ["local", pytest.param("hana", marks=pytest.mark.slow)])
def test_from_nothing_to_a_search(
    cli: Cli, here: Cli, tmp_path: Path, where: list[str], password: dict[str, str], store: str
) -> None:
    owl_sap = {"local": cli, "hana": here}[store]  # processes of its own in one of them
    tables = ["--table", "SAPDEMO.QMEL", "--table", "SAPDEMO.MARA"]
    made = owl_sap("init", *where, *tables, "--store", store, "--json", **password)
    assert made.code == 0, made.err
    assert made.json["collections"] == ["qmel", "makt"]
    assert made.json["next"][0] == "owl-sap plan qmel"
    assert password["HANA_PASSWORD"] not in (tmp_path / FILE).read_text() + (tmp_path / VARIABLES).read_text()
    for command in made.json["next"][store == "hana" :]:  # planned in one of them
        verb, name = command.split()[1:3]
        words = ["leaking pump"] if verb == "search" else []
        run = owl_sap(verb, name, *words, "--json", **password)
        assert run.code == 0, run.err
        assert run.json
    schema = written(tmp_path)["store"].get("schema")
    assert (schema is None) == (store == "local")


def test_what_is_written_says_why(here: Cli, tmp_path: Path, where: list[str], password: dict[str, str]) -> None:
    run = here("init", *where, "--schema", "SAPDEMO", "--table", "MARA", "--language", "de", **password)
    assert run.code == 0, run.err
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    for line in text.splitlines():
        if re.match(r"\w+ = ", line):
            above = text[: text.index(line)].splitlines()[-1]
            explained = "  # " in line or above.startswith("#") or line.startswith(("name", "source"))
            assert explained, f"{line!r} has no word of explanation"
    assert "has REAL_VECTOR" in text
    assert "GUESS: languages, codes and dates" in text
    assert "SAPDEMO.MARA has no text of its own" in text
    assert re.search(r"^# CREATE VIEW .*\n(#.*\n)*# .*WHEN 'D' THEN 1", text, re.MULTILINE)
    assert "plan makt" in run.err
    assert not (tmp_path / ".env").exists()


def test_the_likeliest_tables_by_themselves(
    here: Cli, tmp_path: Path, where: list[str], password: dict[str, str]
) -> None:
    made = here("init", *where, "--schema", "SAPDEMO", "--yes", "--json", "--out", "a/b", **password)
    assert made.code == 0, made.err
    assert made.json["collections"] == ["qmel", "makt", "kna1"]
    assert made.json["next"][0] == f"cd {Path('a/b')} && owl-sap plan qmel"
    assert [each["name"] for each in written(tmp_path / "a" / "b")["collections"]] == made.json["collections"]


def test_tables_whose_names_would_meet_in_hana_get_names_of_their_own(
    here: Cli, sample: Emulator, where: list[str], password: dict[str, str]
) -> None:
    names = ("A-B", "A_B")
    made_of = [f'CREATE COLUMN TABLE ALIKE."{name}" (ID INTEGER PRIMARY KEY, NOTE NVARCHAR(200))' for name in names]
    filled = [f"INSERT INTO ALIKE.\"{name}\" VALUES (1, 'note of {name}')" for name in names]
    tables = [word for name in names for word in ("--table", f"ALIKE.{name}")]
    with beside(sample, "ALIKE", *made_of, *filled):
        made = here("init", *where, *tables, "--store", "hana", "--json", **password)
        assert (made.code, made.json["collections"]) == (0, ["a-b", "a_b-2"]), made.err
        assert [each["upserted"] for each in here("sync", "--all", "--json", **password).json] == [1, 1]


def test_a_password_out_of_a_file(here: Cli, tmp_path: Path, sample: Emulator, where: list[str]) -> None:
    (tmp_path / "secret").write_text(sample.password + "\n")
    run = here("init", *where, "--table", "SAPDEMO.KNA1", "--password-file", "secret", **HASHING)
    assert run.code == 0, run.err
    assert sample.password not in (tmp_path / FILE).read_text()


def test_nothing_is_overwritten_unless_told_so(
    here: Cli, tmp_path: Path, where: list[str], password: dict[str, str]
) -> None:
    table = ["--table", "SAPDEMO.KNA1"]
    assert here("init", *where, *table, **password).code == 0
    before = (tmp_path / FILE).read_text()
    again = here("init", *where, "--table", "SAPDEMO.QMEL", **password)
    assert (again.code, "--force" in again.err, FILE in again.err, VARIABLES in again.err) == (2, True, True, True)
    assert (tmp_path / FILE).read_text() == before
    forced = here("init", *where, *table, "--force", "--json", **password)
    assert (forced.code, forced.json["collections"]) == (0, ["kna1"]), "the name of the file that goes is free"
    assert sorted(path.name for path in tmp_path.iterdir()) == [VARIABLES, FILE]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--table", "SAPDEMO.QMELL"], 2, "Did you mean 'QMEL'"),
        (["--table", "sapdemo.QMEL"], 2, "case-sensitive"),
        (["--table", "QMEL"], 2, "SCHEMA.TABLE"),
        (
            ["--schema", "SAPDEMO"],
            2,
            "no table of SAPDEMO chosen: give --table SCHEMA.TABLE (repeatable), for example SAPDEMO.",
        ),
        (["--schema", "SAPDEM", "--yes"], 2, "Did you mean 'SAPDEMO'"),
        (["--offline", "--table", "SAPDEMO.QMEL"], 2, "--offline"),
        (["--password-file", "nowhere", "--table", "SAPDEMO.QMEL"], 2, "--password-file"),
        (["--table", "SAPDEMO.QMEL", "--out", "/dev/null"], 2, "not a folder"),
        (["--table", "SAPDEMO.QMEL", "--out", "/dev/null/x"], 2, "cannot write to /dev/null/x"),
    ],
)
def test_what_is_refused_and_leaves_nothing_behind(
    here: Cli,
    tmp_path: Path,
    where: list[str],
    password: dict[str, str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    run = here("init", *where, *arguments, **password)
    assert (run.code, said in run.err) == (code, True), run.err
    assert list(tmp_path.iterdir()) == []


def test_a_schema_of_which_nothing_can_be_made(
    here: Cli, tmp_path: Path, sample: Emulator, where: list[str], password: dict[str, str]
) -> None:
    """It holds texts, but nothing like a key."""
    with beside(sample, "KEYLESS", "CREATE COLUMN TABLE KEYLESS.NOTES (NOTE NCLOB)"):
        run = here("init", *where, "--schema", "KEYLESS", "--yes", **password)
    assert (run.code, "KEYLESS.NOTES has no primary key" in run.err) == (2, True), run.err
    assert list(tmp_path.iterdir()) == []


def test_another_folder_is_named_as_the_shell_takes_it(here: Cli, tmp_path: Path) -> None:
    made = here("init", "--offline", "--out", "my files; x", "--trust-store", "ca.pem", "--json")
    assert made.json["next"][0] == "cd 'my files; x' && owl-sap doctor"
    assert written(tmp_path / "my files; x")["hana"]["trust_store"] == str(tmp_path / "ca.pem")


def test_without_a_database_or_the_right_password(here: Cli, tmp_path: Path, where: list[str]) -> None:
    nowhere = here("init", "--table", "S.T")
    assert (nowhere.code, "--host" in nowhere.err, "--offline" in nowhere.err) == (2, True, True)
    wrong = here("init", *where, "--table", "SAPDEMO.QMEL", HANA_PASSWORD="canary-73")
    assert (wrong.code, "canary-73" in wrong.err) == (3, False)
    none = here("init", *where, "--table", "SAPDEMO.QMEL")
    assert (none.code, "HANA_PASSWORD" in none.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- on a terminal


def typed(folder: Path, arguments: list[str], answers: list[tuple[str, str]], **variables: str) -> tuple[int, str]:
    """Exit code and screen of a run on a terminal; each answer is given once its question stands there, and a hidden
    one once the terminal shows no more what is typed: until then it would be thrown away."""
    leader, follower = pty.openpty()
    child = owl_sap(
        *arguments,
        cwd=folder,
        env=environment(**variables),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    screen, waiting, deadline = "", list(answers), time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            if select.select([leader], [], [], 0.05)[0]:
                try:
                    screen += os.read(leader, 4096).decode(errors="replace")
                except OSError:  # the other end is closed: it has ended
                    break
            hidden = not termios.tcgetattr(leader)[3] & termios.ECHO
            if waiting and waiting[0][0] in screen and hidden == waiting[0][0].startswith("Password"):
                os.write(leader, (waiting.pop(0)[1] + "\n").encode())
        assert time.monotonic() < deadline, screen
        return child.wait(60), screen
    finally:
        os.close(leader)
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()


def test_questions_on_a_terminal(tmp_path: Path, sample: Emulator) -> None:
    answers = [
        ("host name", sample.host),
        ("Port", str(sample.port)),
        ("TLS", "n"),
        ("Technical user", sample.user),
        ("Password", sample.password),
        ("separated by commas) [1]: ", ","),
        ("separated by commas) [1]: ,", "99"),
        ("(1 to", "1, V_MATERIALS"),
    ]
    code, screen = typed(tmp_path, ["init", "--store", "local"], answers, **HASHING)
    assert code == 0, screen
    assert sample.password not in screen
    assert "99 is not in the list" in screen
    names = [each["name"] for each in written(tmp_path)["collections"]]
    assert names == ["qmel", "v_materials"]
    assert "owl-sap search qmel" in screen


def test_ctrl_c_at_a_question_ends_as_everywhere() -> None:
    """Click makes an Abort of it."""

    def question() -> None:
        raise typer.Abort

    with pytest.raises(typer.Exit) as ended:
        guarded(question)()
    assert ended.value.exit_code == 130


# --------------------------------------------------------------------------------------------------- without a database


def test_a_template_to_fill_in(here: Cli, tmp_path: Path) -> None:
    run = here("init", "--offline", "--host", "hana.example.org", "--json")
    assert run.code == 0, run.err
    assert run.json["collections"] == []
    assert load(environ={}, folder=tmp_path).settings.hana.host == "hana.example.org"
    assert "HANA_PASSWORD=\n" in (tmp_path / VARIABLES).read_text()


def test_every_comment_of_a_setting_can_be_uncommented(here: Cli, tmp_path: Path) -> None:
    """One after the other, and in the block of a collection all at once."""
    assert here("init", "--offline").code == 0
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    before, block = text.split("# [[collections]]\n")
    head, settings = before.splitlines(), 0
    for number, line in enumerate(head):
        if re.match(r"# \w+ = ", line):
            settings += 1
            changed = [*head[:number], line.removeprefix("# "), *head[number + 1 :]]
            (tmp_path / FILE).write_text("\n".join(changed), encoding="utf-8")
            load(environ={}, folder=tmp_path)
    assert settings >= 20
    lines = [line.removeprefix("# ") for line in block.splitlines() if " = " in line]
    (tmp_path / FILE).write_text("[[collections]]\n" + "\n".join(lines), encoding="utf-8")
    (collection,) = load(environ={}, folder=tmp_path).settings.collections
    assert (collection.name, collection.source) == ("materials", "SAPABAP1.MAKT")
    assert collection.schedule is not None
