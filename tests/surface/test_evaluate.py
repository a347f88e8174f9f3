"""owl-sap evaluate: figures by mode, saved and compared; lines that are wrong; what an index loses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.src.evaluation.queries import read
from connector.errors import ConfigurationError
from tests.adversity.scene import Scene

SLOW_LOCAL, SLOW_HANA = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("local", "hana"))
RIGHT = '{"query": "a", "relevant": [["1"]]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: invalid JSON"),
        ("[]", "line 2: must be a JSON object"),
        ('{"query": " ", "relevant": [["1"]]}', "line 2: .query. must be a text"),
        ('{"query": "b"}', "line 2: .relevant. must be a list"),
        ('{"query": "b", "relevant": []}', "line 2: .relevant. must be a list"),
        ('{"query": "b", "relevant": [["1"], ["1"]]}', "line 2: .relevant. names a row twice"),
        ('{"query": "b", "relevant": [["1"], "1"]}', "line 2: .relevant. names a row twice"),
        ('{"query": "b", "relevant": [["1", "2"]]}', "line 2: .* 2 key values; the collection has 1"),
        ('{"query": "b", "relevant": [[["1"]]]}', "line 2: a row of .relevant."),
        ('{"query": "b", "relevant": [{"MATNRX": "1"}]}', "line 2: .* must name the key columns MATNR"),
        (
            '{"query": "b", "relevant": [["1"]], "filters": {}}',
            'line 2: "filters" is unknown; known names: query',
        ),
        ('{"query": "b", "relevant": [["1"]], "filter": []}', "line 2: .filter. must be an object"),
        (RIGHT, "line 2: the query repeats line 1"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text(f"{RIGHT}\n{line}\n")
    with pytest.raises(ConfigurationError, match=message) as raised:
        read(file, ("MATNR",))
    assert str(file) in str(raised.value)


def test_what_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="contains no queries"):
        read(tmp_path / "empty.jsonl")


def test_a_row_is_named_by_its_key_or_its_id_and_answers_once(tmp_path: Path) -> None:
    file = tmp_path / "queries.jsonl"
    rows = [["1"], {"MATNR": "2"}, '["3"]', "4", "record:5"]
    file.write_text(json.dumps({"query": "a", "relevant": rows}))
    (query,) = read(file, ("MATNR",))
    ids = ['["1"]', '["1"]', '["2"]', '["3"]', '["4"]', "4", "record:5", '["9"]']
    assert query.ranks(ids) == (1, 3, 4, 5, 7)


def test_a_file_as_other_programs_write_it(tmp_path: Path) -> None:
    """With a mark of the byte order, CR LF, and separators that JSON leaves as they are."""
    file = tmp_path / "queries.jsonl"
    file.write_bytes('\ufeff{"query": "a\u2028b\u0085c", "relevant": [["1"]]}\r\n\r\n'.encode())
    (query,) = read(file, ("MATNR",))
    assert query.text == "a\u2028b\u0085c"


@pytest.fixture(params=["local"])
def synced(make_scene: Callable[..., Scene], request: pytest.FixtureRequest) -> Scene:
    scene = make_scene(request.param, rows=30)
    assert scene.verb("sync", "rows")[0] == 0
    (scene.folder / "queries.jsonl").write_text(
        "".join(
            json.dumps(entry) + "\n"
            for entry in (
                {"query": "pump 12 of plant 5", "relevant": [[12]], "group": "exact"},
                {"query": "pump 21", "relevant": [{"K": 21}], "group": "exact", "filter": {"GRP": "G0"}},
                {"query": "nothing like it", "relevant": [[999]]},
            )
        )
    )
    return scene


@pytest.mark.parametrize("synced", [SLOW_HANA, "local"], indirect=True)
def test_figures_by_mode_and_what_changed(synced: Scene) -> None:
    code, out, err = synced.cli("evaluate", "rows", "queries.jsonl", "--save", "report.json", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["queries"] == 3
    assert report["missing"] == 1
    assert "1 labelled rows are not in the collection and count as not found: [999]" in err
    assert list(report["modes"]) == ["vector", "keyword", "hybrid"]
    hybrid = report["modes"]["hybrid"]
    assert hybrid["groups"]["exact"]["queries"] == 2
    assert hybrid["groups"]["exact"]["hit_1"] == 1
    assert hybrid["groups"]["other"]["hit_10"] == 0
    assert hybrid["all"]["mrr"] == pytest.approx(2 / 3, abs=1e-4)
    assert [each["line"] for each in hybrid["worst"]] == [3]

    code, out, err = synced.cli(
        "evaluate", "rows", "queries.jsonl", "--mode", "hybrid", "--against", "report.json", "--json"
    )
    assert code == 0, err
    same: dict[str, Any] = json.loads(out)["differences"]["hybrid"]["mrr"]
    assert (same["difference"], same["p"], same["queries"]) == (0, 1, 3)

    code, out, err = synced.cli("--output", "table", "evaluate", "rows", "queries.jsonl", "--mode", "keyword")
    assert code == 0
    assert "rows: 1 of 3 queries, " in err
    assert "3 queries, k = 10" in out
    assert "nothing like it" in out


def test_progress_counts_queries_and_what_searches_say_is_told(synced: Scene) -> None:
    with (synced.folder / "queries.jsonl").open("a") as file:
        file.write('{"query": "pump 3", "relevant": [[3]], "filter": {"GRUP": "G0"}}\n')
    code, out, err = synced.verb("evaluate", "rows", "queries.jsonl", "--mode", "keyword", "--json")
    assert code == 0, err
    *_, note = json.loads(out)["notes"]
    assert note.startswith('line 4: "rows" declares no metadata named GRUP')
    assert note in " ".join(err.split())
    first = json.loads(err.splitlines()[0])
    assert (first["collection"], first["done"], first["total"]) == ("rows", 1, 4)
    assert "queries_per_second" in first


@pytest.mark.parametrize("synced", ["hana", SLOW_LOCAL], indirect=True)
def test_an_index_against_exact_search(synced: Scene) -> None:
    code, out, err = synced.verb("evaluate", "rows", "--recall", "--queries", "8", "-k", "5", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["queries"], report["k"]) == (8, 5)
    assert report["index_used"] is False, "too few rows for one"
    assert report["recall"] == report["low"] == report["high"] == report["same_first"] == 1


def test_what_cannot_be_evaluated(synced: Scene) -> None:
    (synced.folder / "wrong.jsonl").write_text('{"query": "a", "relevant": [[1]], "filter": {"GRP": {"$no": 1}}}')
    (synced.folder / "no-report.json").write_text("{}")
    (synced.folder / "short.json").write_text('{"format": 1, "k": 10, "modes": {"keyword": {"all": {}}}}')
    (synced.folder / "other-k.json").write_text('{"format": 1, "k": 3, "modes": {}}')
    for arguments, message in (
        (("rows",), "give a FILE of labelled queries, or --recall"),
        (("rows", "queries.jsonl", "--recall"), "give a FILE of labelled queries, or --recall"),
        (("rows", "none.jsonl"), "none.jsonl cannot be read"),
        (("rows", "wrong.jsonl"), "line 1: "),
        (("rows", "queries.jsonl", "--mode", "fuzzy"), "'fuzzy' is not one of"),
        (("rows", "queries.jsonl", "--against", "no-report.json"), "not a report of"),
        (("rows", "queries.jsonl", "--against", "short.json"), "the output of --json is shorter"),
        (("rows", "queries.jsonl", "--against", "other-k.json"), "made with -k 3, this one with -k 10"),
        (("row", "queries.jsonl"), 'did you mean "rows"'),
    ):
        code, _, err = synced.verb("evaluate", *arguments)
        assert code == 2, err
        assert message in " ".join(err.split()), err
