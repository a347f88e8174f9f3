"""What `owl-sap embed` takes for a line, and that every form of its output holds the same vectors in the same order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.cli.exits import UsageFault
from app.src.cli.search import lines_of, write_vectors
from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder

HASH = {"OWL_SAP_EMBEDDING__MODEL": "hash:16"}
ENGINE = load_engine(EngineOptions("hash:16"))
Cli = Callable[..., Any]


def texts_in(file: Path) -> list[str]:
    return [text for batch in lines_of(file) for text in batch]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"\n\na", ["", "", "a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\n\r\nb", ["a", "", "b"]),
        (b"  a \t\n", ["  a \t"]),  # blanks are part of a text
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),  # a byte order mark is not
        (b"\xef\xbb\xbf", []),
        ("Öl 🦉\n漢字".encode(), ["Öl 🦉", "漢字"]),
        ("a\u2028b\u0085c\x0bd\x0ce".encode(), ["a\u2028b\u0085c\x0bd\x0ce"]),  # these end no line
        (b"a\x00b\n", ["a\x00b"]),
        (b"x" * 200_000 + b"\ny", ["x" * 200_000, "y"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_lines(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    (tmp_path / "texts").write_bytes(content)
    assert texts_in(tmp_path / "texts") == texts


@pytest.mark.parametrize(
    "content", [b"\xff", b"ok\n\xc3(", b"ok\n" * 5000 + b"\xe2\x82", "Öl".encode("latin-1"), b"\xff\xfea\x00"]
)
def test_bytes_that_are_no_utf_8(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "texts").write_bytes(content)
    with pytest.raises(UsageFault, match="not UTF-8") as caught:
        texts_in(tmp_path / "texts")
    assert str(tmp_path / "texts") in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "batches"), [(0, []), (1, [1]), (4096, [4096]), (4097, [4096, 1]), (9000, [4096, 4096, 808])]
)
def test_long_input_comes_in_batches(tmp_path: Path, lines: int, batches: list[int]) -> None:
    (tmp_path / "texts").write_text("x\n" * lines)
    assert [len(batch) for batch in lines_of(tmp_path / "texts")] == batches


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff"), max_size=20), max_size=20
    )
)
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    file = tmp_path_factory.getbasetemp() / "any-texts"
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", newline="")
    assert texts_in(file) == texts


TEXTS = ["steel", "", "Öl 🦉", "steel", "w " * 300]
VECTORS = ENGINE.embed(TEXTS)


def given_to(file: Path | None, json: bool, texts: list[str], batch: int = 2) -> None:
    batches = (texts[start : start + batch] for start in range(0, len(texts), batch))
    write_vectors(EngineEmbedder(ENGINE), batches, file, json)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_json_lines(capfdbinary: pytest.CaptureFixture[bytes], batch: int) -> None:
    given_to(None, False, TEXTS, batch)
    out, errors = capfdbinary.readouterr()
    np.testing.assert_array_equal(np.array([json.loads(line) for line in out.splitlines()], dtype=np.float32), VECTORS)
    assert b"1 texts exceed the model's limit" in errors


def test_one_document(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    given_to(None, True, TEXTS)
    out, _ = capfdbinary.readouterr()
    np.testing.assert_array_equal(np.array(json.loads(out), dtype=np.float32), VECTORS)


@pytest.mark.parametrize("texts", [TEXTS, ["one"], []])
def test_a_file_of_numpy(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], texts: list[str]) -> None:
    given_to(tmp_path / "v.npy", False, texts)
    stored = np.load(tmp_path / "v.npy")
    assert (stored.dtype, stored.shape) == (np.float32, (len(texts), 16))
    np.testing.assert_array_equal(stored, VECTORS[: len(texts)] if texts != ["one"] else ENGINE.embed(texts))
    out, errors = capfdbinary.readouterr()
    assert out == b""
    assert f"{len(texts)} vectors of 16 numbers".encode() in errors


def test_nothing_in_one_document(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    given_to(None, True, [])
    assert capfdbinary.readouterr() == (b"[]\n", b"")


# -------------------------------------------------------------------------------------------------------- as a process


def test_stdin_and_file_give_the_same(cli: Cli, tmp_path: Path) -> None:
    lines = "steel\r\n\r\nÖl 🦉\r\nsteel\r\n"
    (tmp_path / "texts").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    from_file = cli("embed", "texts", **HASH)
    from_stdin = cli("embed", stdin="\ufeff" + lines, **HASH)
    assert (from_file.code, from_file.err) == (0, "")
    assert from_stdin.out == from_file.out
    found = np.array([json.loads(line) for line in from_file.out.splitlines()], dtype=np.float32)
    np.testing.assert_array_equal(found, ENGINE.embed(["steel", "", "Öl 🦉", "steel"]))


@pytest.mark.parametrize(
    ("options", "embedded"),
    [((), "passage: oil"), (("--as", "document"), "passage: oil"), (("--as", "query"), "query: oil")],
)
def test_texts_are_embedded_as_queries_or_documents(cli: Cli, options: tuple[str, ...], embedded: str) -> None:
    prompts = {"OWL_SAP_EMBEDDING__QUERY_PROMPT": "query: ", "OWL_SAP_EMBEDDING__DOCUMENT_PROMPT": "passage: "}
    run = cli("embed", *options, stdin="oil\n", **HASH, **prompts)
    np.testing.assert_array_equal(np.array([json.loads(run.out)], dtype=np.float32), ENGINE.embed([embedded]))


def test_texts_are_embedded_as_nothing_else(cli: Cli) -> None:
    run = cli("embed", "--as", "passage", stdin="oil\n", **HASH)
    assert run.code == 2
    assert "'query', 'document'" in run.err


@pytest.mark.slow
def test_a_stdin_that_is_closed(tmp_path: Path) -> None:
    command = ["bash", "-c", 'exec "$0" -m app embed <&-', sys.executable]
    variables = {**os.environ, **HASH, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr.strip()) == (2, "", "owl-sap: stdin: Bad file descriptor [OWL-1001]")


@pytest.mark.parametrize(
    "locale", ["C", *(pytest.param(name, marks=pytest.mark.slow) for name in ("POSIX", "en_US.ISO-8859-1"))]
)
def test_the_locale_does_not_matter(cli: Cli, locale: str) -> None:
    run = cli("embed", stdin="Öl 🦉\n", LC_ALL=locale, LANG=locale, PYTHONUTF8="0", **HASH)
    assert run.code == 0, run.err
    np.testing.assert_array_equal(np.array(json.loads(run.out), dtype=np.float32), ENGINE.embed(["Öl 🦉"])[0])


# --------------------------------------------------------------------------------------------------- golden messages

COLLECTION = '[[collections]]\nname = "materials"\nsource = "S.T"\ntemplate = "{X}"\n'
LOCAL = HASH | {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors"}
GOLDEN = [
    (
        ["status", "materils"],
        {},
        'owl-sap: no collection is named "materils"; did you mean "materials"?',
    ),
    (
        ["status", "xyz"],
        {},
        'owl-sap: no collection is named "xyz"; there are: materials',
    ),
    (
        ["sync"],
        {},
        "owl-sap: name the collections to sync, or give --all (not both)",
    ),
    (
        ["search", "materials", "x"],
        {},
        'owl-sap: the collection "materials" was never synced; run: owl-sap sync materials',
    ),
    (
        ["search", "materials", "x", "--filter", "[1]"],
        {},
        'owl-sap: --filter must be a JSON object, for example \'{"MTART": "FERT"}\'',
    ),
    (
        ["status"],
        {"OWL_SAP_API__PROT": "1"},
        'owl-sap: environment OWL_SAP_API__PROT: no such setting; did you mean "OWL_SAP_API__PORT"?; '
        "see owl-sap config schema",
    ),
    (
        ["--config", "x.toml", "status"],
        {},
        "owl-sap: x.toml: configuration file not found; see owl-sap.example.toml for a start",
    ),
    (
        ["embed", "nowhere"],
        {},
        "owl-sap: nowhere: No such file or directory",
    ),
    (
        ["embed"],
        {"OWL_SAP_EMBEDDING__MODEL": "hash:7"},
        "owl-sap: model 'hash:7': a hashing model is hash:N with N from 8 to 4096",
    ),
]


@pytest.mark.parametrize(("arguments", "variables", "message"), GOLDEN, ids=lambda value: " ".join(value)[:30])
def test_messages_word_for_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    message: str,
) -> None:
    """In this process, for speed; `test_cli.py` shows that a process of its own says the same."""
    from typer.testing import CliRunner

    from app.src.cli import app

    for name in [name for name in os.environ if name.startswith(("OWL_SAP_", "HANA_", "T4_GPU_", "USE_GPU"))]:
        monkeypatch.delenv(name)
    for name, value in (LOCAL | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    run = CliRunner().invoke(app, arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    told, code = " ".join(run.stderr.split()).rsplit(" ", 1)
    assert told == message
    assert re.fullmatch(r"\[OWL-[14]\d{3}\]", code), "what was written, or the model"
