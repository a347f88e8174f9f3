"""Configuration at random: files and variables that are valid but for some values, keys, lines and characters. They are
read, or refused with words that say where; secrets stand in none of them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.src.settings.sources import OWN_VARIABLES
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES
from tests.fuzz import outcomes

REPOSITORY = Path(__file__).resolve().parents[2]

QUICKLY = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
EXAMPLE = (REPOSITORY / "owl-sap.example.toml").read_text(encoding="utf-8")
FULL = f"""
[hana]
host = "db.example"
port = 443
user = "u"
password = "{outcomes.CANARY}"
[store]
kind = "local"
path = "vectors"
[store.hana]
password = "{outcomes.CANARY}"
[embedding]
model = "hash:8"
precision = "fp32"
max_wait = "10s"
[api]
threads = 8
[state]
path = "jobs"
[[collections]]
name = "materials"
source = 'S."a.b"'
key = ["MANDT", "MATNR"]
template = "{{MAKTX}}. {{LTEXT}}"
metadata = ["MTART"]
changes = {{ method = "watermark", column = "C", delay = "30s" }}
chunk = {{ max_tokens = 64, overlap = 8 }}
schedule = {{ cron = "15 2 * * *", timezone = "Europe/Berlin", jitter = "5s" }}
"""
SECRETS = {"HANA_PASSWORD": outcomes.CANARY, "OWL_SAP_HANA__PASSWORD": outcomes.CANARY}
NAMES = [*OWN_VARIABLES, *(variable.name for variable in (*VARIABLES, *GUIDE_VARIABLES))]
WORDS = (
    *(
        "true",
        "0",
        "-1",
        "1e400",
        "nan",
        "inf",
        "9" * 5_000,
        "10s",
        "1h30m",
        "99999d",
        "cuda:1",
        "hash:8",
        "fp16",
        "null",
    ),
    *("[[collections]]\nname = 'a'\nsource = 'S.T'\ntemplate = '{A}'", "collections = 1", "[", "{}", "../x", "S.T"),
    *("* * * * *", "0 0 31 2 *", "Europe/Berlin", "../../etc/passwd", "\0", "\udcff", " ", "ä", "a" * 200, "/dev/null"),
)
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=10))
VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-2, 9),
        st.floats(),
        st.datetimes(),
        st.dates(),
        TEXTS.filter(lambda text: "\udcff" not in text),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_. ", max_size=4), inner, max_size=3),
    max_leaves=5,
)
SECRET = st.sampled_from([outcomes.CANARY, [outcomes.CANARY], {"a": outcomes.CANARY}, [[outcomes.CANARY] * 2]])
REFUSED_AS_TEXT = (
    "[" * 3_000,
    "{a=" * 3_000,
    "9" * 5_000,
    "1_0",
    "0x" + "f" * 5_000,
    "'''",
    "\x00",
    "2024-13-45",
    "a" * 5_000,
)


def places(tree: Any) -> list[tuple[Any, ...]]:
    """Of all values in a document, those that hold others too; but not of secrets, which may not become something that
    messages repeat rightly, as a name is."""
    found: list[tuple[Any, ...]] = []
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in inner:
        found.append((name,))
        found += [(name, *rest) for rest in places(value)]
    return found


PLACES = places(tomllib.loads(FULL))


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """FULL with some values replaced, left out or under another name."""
    tree: Any = tomllib.loads(FULL)
    for *path, last in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        node = tree
        try:
            for name in path:
                node = node[name]
            node[last]
        except (KeyError, IndexError, TypeError):
            continue  # gone by a change before
        if isinstance(node, str):
            continue  # by a change before a text, of which a character may not be replaced
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
        if change == "replace":
            node[last] = draw(SECRET if last == "password" else VALUES)
        elif change == "remove" or isinstance(node, list):
            del node[last]
        else:
            node[draw(st.text("abcdefghijklmnop_", min_size=1, max_size=8))] = node.pop(last)
    return tomlkit.dumps(tree).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid file in which pieces are cut out, doubled, or replaced."""
    text = draw(st.sampled_from([EXAMPLE, FULL])).encode()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(
            st.one_of(
                st.binary(max_size=4), st.sampled_from(REFUSED_AS_TEXT).map(str.encode), st.just(text[start:end] * 2)
            )
        )
        text = text[:start] + piece + text[end:]
    return text


environs = st.dictionaries(
    st.one_of(st.sampled_from(NAMES), st.sampled_from(NAMES).map(lambda name: f"{name}_FILE")), TEXTS, max_size=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configuration")


def test_the_files_that_are_damaged_are_valid(folder: Path) -> None:
    for text in (EXAMPLE, FULL):
        assert outcomes.check_configuration(folder, text.encode(), {}) is not None
    assert outcomes.check_configuration(folder, FULL.encode(), SECRETS) is not None


@settings(QUICKLY, max_examples=50)
@given(toml=documents(), environ=environs)
def test_read_or_refused_with_words(folder: Path, toml: bytes, environ: dict[str, str]) -> None:
    outcomes.check_configuration(folder, toml, environ)


@settings(QUICKLY, max_examples=50)
@given(toml=damaged())
def test_damaged_files(folder: Path, toml: bytes) -> None:
    outcomes.check_configuration(folder, toml, {})


@settings(QUICKLY, max_examples=50)
@given(environ=environs)
def test_variables(folder: Path, environ: dict[str, str]) -> None:
    outcomes.check_configuration(folder, FULL.encode(), SECRETS | environ)


@pytest.mark.slow
@settings(QUICKLY, max_examples=10_000)
@given(toml=st.one_of(documents(), damaged()), environ=environs)
def test_configuration_for_minutes(folder: Path, toml: bytes, environ: dict[str, str]) -> None:
    outcomes.check_configuration(folder, toml, environ)


# ---------------------------------------------------------------------------------------------------- found so far


@pytest.mark.parametrize(
    "toml",
    [b"a = " + b"[" * 5_000, b"a = " + b"{a=" * 5_000, b"[api]\nport = " + b"9" * 5_000, b"a = 0x" + b"f" * 9_000],
    ids=lambda toml: toml[:12].decode(),
)
def test_toml_beyond_what_the_parser_takes(folder: Path, toml: bytes) -> None:
    """RecursionError and ValueError came out of tomllib with a traceback."""
    assert outcomes.check_configuration(folder, toml, {}) is None
    collections = {"OWL_SAP_COLLECTIONS": toml.decode()}
    assert outcomes.check_configuration(folder, FULL.encode(), collections) is None


@pytest.mark.parametrize("name", ["HANA_PASSWORD_FILE", "OWL_SAP_HANA__PASSWORD_FILE"])
def test_a_secret_in_place_of_the_file_that_holds_it(folder: Path, name: str) -> None:
    """The message named the file, which was the secret."""
    without = FULL.replace(f'password = "{outcomes.CANARY}"\n', "", 1).encode()
    for text in (outcomes.CANARY, f"{outcomes.CANARY}\0", f"/{outcomes.CANARY}" * 300):
        assert outcomes.check_configuration(folder, without, {name: text}) is None


@pytest.mark.parametrize("changes", ['"a\\nb"', '{ method = "a\\u2028b" }'])
def test_a_value_of_two_lines_is_told_in_one(folder: Path, changes: str) -> None:
    """The message repeated it as it was, and its second line said nothing of where."""
    toml = f'[[collections]]\nname = "a"\nsource = "S.T"\nchanges = {changes}\n'.encode()
    assert outcomes.check_configuration(folder, toml, {}) is None


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_without_an_end(folder: Path, number: str) -> None:
    """They were taken for seconds, and the driver's milliseconds overflowed."""
    for section, key in (("hana", "connect_timeout"), ("sync", "give_up_after"), ("sync", "lease_wait")):
        toml = f"[{section}]\n{key} = {number}\n".encode()
        assert outcomes.check_configuration(folder, toml, {}) is None, (section, key)
