"""Collections created through HTTP: what is written to the settings file, what is refused, and who notices."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.service.service import Service
from app.src.settings import Settings, SettingsError, load
from tests.api.conftest import TableSource, serving
from tests.api.test_routes import problem

FILE = """\
# The shop's own comment.
[embedding]
model = "hash:64"   # for tests

[store]
kind = "local"
path = "{folder}/vectors"

[[collections]]
name = "materials"
source = "S.MARA"
template = "{{MAKTX}}"
"""
BLOCK = {"name": "parts", "source": "S.MARA", "template": "Part {MAKTX}", "metadata": ["MTART"], "where": "1 = 1"}
PATH = "/v1/collections"
JSON = {"content-type": "application/json"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "owl-sap.toml"
    file.write_text(FILE.format(folder=tmp_path), encoding="utf-8")
    return file


@pytest.fixture
def service(file: Path, source: TableSource) -> Iterator[Service]:
    with closing(Service(load(file).settings, source=source, file=file)) as service:
        service.background.run(schedules=True)
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


def until_over(client: httpx.Client, job: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (found := client.get(f"/v1/jobs/{job}").json())["state"] in ("queued", "running", "waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return dict(found)


def blocks(file: Path) -> list[dict[str, Any]]:
    return list(tomllib.loads(file.read_text(encoding="utf-8"))["collections"])


def test_a_collection_is_created_synced_and_searched_at_once(client: httpx.Client, file: Path) -> None:
    before, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
    answer = client.post(PATH, json=BLOCK | {"model": None, "changes": {"method": "full", "log": None}})
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/collections/parts"
    assert answer.json()["collection"] == "parts"

    after = file.read_text(encoding="utf-8")
    assert after == before + "\n" + answer.json()["toml"], "comments and spaces stay"
    assert blocks(file)[1] == BLOCK | {"changes": {"method": "full"}}
    assert "# Created over REST by loopback on " in after
    assert file.stat().st_mode == mode
    assert sorted(each.name for each in file.parent.iterdir() if each.is_file()) == ["owl-sap.toml"]

    assert [each["collection"] for each in client.get(PATH).json()] == ["materials", "parts"]
    job = client.post(f"{PATH}/parts/sync", json={}).json()["job"]
    assert until_over(client, job)["state"] == "succeeded"
    found = client.post(f"{PATH}/parts/search", json={"query": "pump", "filter": {"MTART": "ROH"}, "k": 1}).json()
    assert found["hits"][0]["text"] == "Part hydraulic oil pump"
    assert [each.name for each in load(file).settings.collections] == ["materials", "parts"]


def test_a_schedule_starts(client: httpx.Client) -> None:
    assert client.post(PATH, json=BLOCK | {"schedule": {"every": "1h"}}).status_code == 201
    assert client.get(f"{PATH}/parts").json()["next_sync"] is not None


def test_examples_of_queries(client: httpx.Client) -> None:
    assert client.post(PATH, json=BLOCK | {"examples": ["oil, pump", "chair"]}).status_code == 201
    assert client.get(f"{PATH}/parts").json()["examples"] == ["oil, pump", "chair"]


def test_of_clients(client: httpx.Client, file: Path) -> None:
    assert client.post(PATH, json={"name": "notes", "documents": True}).status_code == 201
    assert blocks(file)[1] == {"name": "notes", "documents": True}
    answer = client.post(f"{PATH}/notes/documents", json={"documents": [{"text": "Call the plant"}]})
    assert answer.status_code == 200


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "misspelt": ({"templat": "{MAKTX}"}, "body.templat", 'did you mean "template"?'),
    "misspelt inside": ({"chunk": {"max_token": 8}}, "body.chunk.max_token", 'did you mean "max_tokens"?'),
    "bad name": ({"name": "a b"}, "body.name", "use letters, digits, - and _"),
    "no template": ({"template": ""}, "body", "template missing"),
    "bad method": ({"changes": {"method": "magic"}}, "body.changes.method", "'watermark'"),
    "not a text": ({"where": 5}, "body.where", "valid string"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_named(client: httpx.Client, file: Path, case: str) -> None:
    changed, where, what = REFUSED[case]
    before = file.read_bytes()
    fault = problem(client.post(PATH, content=_ascii(BLOCK | changed), headers=JSON), 422)
    assert [each["where"] for each in fault["errors"]] == [where]
    assert what in fault["errors"][0]["what"]
    assert file.read_bytes() == before


def _ascii(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"source": "S.NOWHERE"}, "OWL-1005", "S.NOWHERE"),
        ({"template": "{MAKT}"}, "OWL-1006", "MAKTX"),
        ({"metadata": ["MTARD"]}, "OWL-1006", "MTART"),
        ({"key": ["NR"]}, "OWL-1006", "key"),
        ({"changes": {"method": "watermark", "column": "AEDAT"}}, "OWL-1006", "AEDAT"),
        ({"changes": {"method": "delta"}}, "OWL-1005", "_Delta"),
        ({"model": "no-such-model"}, "OWL-1003", "`model`"),
    ],
)
def test_what_the_source_or_the_engine_does_not_have(
    client: httpx.Client, file: Path, changed: dict[str, Any], code: str, said: str
) -> None:
    before = file.read_bytes()
    fault = problem(client.post(PATH, json=BLOCK | changed), 422)
    assert fault["code"] == code
    assert said in fault["detail"]
    assert file.read_bytes() == before
    assert [each["collection"] for each in client.get(PATH).json()] == ["materials"]


@pytest.mark.parametrize("of_clients", [False, True])
def test_a_prompt_that_leaves_no_room(client: httpx.Client, *, of_clients: bool) -> None:
    block = {"name": "notes", "documents": True} if of_clients else BLOCK
    fault = problem(client.post(PATH, json=block | {"document_prompt": "word " * 300}), 422)
    assert "leaves no room" in fault["detail"]


def test_a_model_with_prompts_is_loaded_once(client: httpx.Client, service: Service) -> None:
    before = len(service.parts._models)
    assert client.post(PATH, json=BLOCK | {"model": "hash:32", "query_prompt": "query: "}).status_code == 201
    service.parts.embedder_for("parts")
    assert len(service.parts._models) == before + 1


@pytest.mark.parametrize("name", ["materials", "Materials"])
def test_a_name_that_is_taken(client: httpx.Client, file: Path, name: str) -> None:
    before = file.read_bytes()
    fault = problem(client.post(PATH, json=BLOCK | {"name": name}), 409)
    assert fault["code"] == "OWL-1020"
    assert '"materials"' in fault["detail"]
    assert "toml" not in fault
    assert file.read_bytes() == before


def test_an_unpaired_surrogate(client: httpx.Client) -> None:
    answer = client.post(PATH, content=_ascii(BLOCK | {"template": "\ud800{MAKTX}"}), headers=JSON)
    assert "surrogates" in problem(answer, 422)["detail"]


def test_without_a_file_the_block_comes_back(settings: Settings, source: TableSource) -> None:
    with closing(Service(settings, source=source)) as service, serving(service) as client:
        fault = problem(client.post(PATH, json=BLOCK), 409)
        assert fault["code"] == "OWL-1021"
        assert tomllib.loads(fault["toml"])["collections"] == [BLOCK]
        assert client.get(f"{PATH}/parts").status_code == 404


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("collections = []\n", "as a list"),
        ("[embedding]\nmodle = 1\n", "did you mean"),
        ("[embedding\n", "not valid TOML"),
        (None, "cannot be written"),
    ],
)
def test_a_file_that_cannot_take_it(client: httpx.Client, file: Path, text: str | None, said: str) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    fault = problem(client.post(PATH, json=BLOCK), 409)
    assert fault["code"] == "OWL-1021"
    assert said in fault["detail"]
    assert str(file.parent) not in fault["detail"]
    assert tomllib.loads(fault["toml"])["collections"] == [BLOCK]
    assert text is None or file.read_text() == text
    assert client.get(f"{PATH}/materials").status_code == 200, "the service goes on"


def test_collections_from_a_variable(client: httpx.Client, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWL_SAP_COLLECTIONS", '[[collections]]\nname = "materials"\ndocuments = true')
    fault = problem(client.post(PATH, json=BLOCK), 409)
    assert "OWL_SAP_COLLECTIONS" in fault["detail"]


def test_two_at_once(client: httpx.Client, file: Path) -> None:
    answers: list[int] = []
    names = [*(f"n{number}" for number in range(6)), "same", "same"]
    posts = [
        threading.Thread(
            target=lambda name=name: answers.append(client.post(PATH, json=BLOCK | {"name": name}).status_code)
        )
        for name in names
    ]
    for post in posts:
        post.start()
    for post in posts:
        post.join()
    assert sorted(answers) == [201] * 7 + [409]
    assert sorted(block["name"] for block in blocks(file)) == ["materials", *sorted(set(names))]


def test_an_edit_by_hand_meanwhile_is_kept(client: httpx.Client, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edited(path: Path) -> Any:
        loaded = load(path)
        with file.open("a", encoding="utf-8") as opened:
            opened.write("# mine\n")
        return loaded

    monkeypatch.setattr("app.src.settings.writing.load", edited)
    assert client.post(PATH, json=BLOCK).status_code == 201
    assert "\n# mine\n" in file.read_text(encoding="utf-8")
    assert [block["name"] for block in blocks(file)] == ["materials", "parts"]


def test_a_file_that_is_replaced_meanwhile(client: httpx.Client, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(path: Path) -> Any:
        new = path.with_suffix(".new")
        new.write_bytes(path.read_bytes())
        new.replace(path)
        return load(path)

    monkeypatch.setattr("app.src.settings.writing.load", replaced)
    fault = problem(client.post(PATH, json=BLOCK), 409)
    assert "replaced at the same time" in fault["detail"]
    assert tomllib.loads(fault["toml"])["collections"] == [BLOCK]
    assert [block["name"] for block in blocks(file)] == ["materials"]


@pytest.mark.parametrize("documents", [False, True])
def test_no_part_of_a_block_is_valid(client: httpx.Client, file: Path, tmp_path: Path, *, documents: bool) -> None:
    """A reader may see a part of what is being written, which must not be a collection without its row rights."""
    before = file.read_text(encoding="utf-8")
    block: dict[str, Any] = BLOCK | {"row_rights": {"MTART": "kind"}, "model": "hash:32", "examples": ["pump"]}
    if documents:
        block = {"name": "notes", "documents": True, "metadata": ["OWNER"], "row_rights": {"OWNER": "owner"}}
    assert client.post(PATH, json=block).status_code == 201
    after, part = file.read_text(encoding="utf-8"), tmp_path / "part.toml"
    for size in range(len(before), len(after.rstrip())):
        part.write_text(after[:size], encoding="utf-8")
        with suppress(SettingsError):
            assert [each.name for each in load(part).settings.collections] == ["materials"], after[len(before) : size]


def test_a_link_and_windows_line_ends_stay(client: httpx.Client, file: Path) -> None:
    real = file.with_name("real.toml")
    real.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    file.unlink()
    file.symlink_to(real)
    assert client.post(PATH, json=BLOCK).status_code == 201
    assert file.is_symlink()
    assert b"\n" not in real.read_bytes().replace(b"\r\n", b"")
    assert blocks(file)[1] == BLOCK


def test_another_process_notices(client: httpx.Client, file: Path, source: TableSource) -> None:
    """A worker, or a second service, that shares the file and the store."""
    with closing(Service(load(file).settings, source=source, file=file)) as other:
        assert other.collections.names == ["materials"]
        assert client.post(PATH, json=BLOCK | {"schedule": {"every": "1h"}}).status_code == 201
        assert other.collections.block("parts").template == "Part {MAKTX}"
        other.sync.run("parts")
        assert [each["collection"] for each in other.status.collections()] == ["materials", "parts"]
        assert other.background.scheduler.next_start("parts") is not None


def test_a_block_added_by_hand_needs_no_restart(client: httpx.Client, service: Service, file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + '\n[[collections]]\nname = "notes"\ndocuments = true\n')
    deadline = time.monotonic() + 60
    while client.get(f"{PATH}/notes").status_code == 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the file is looked at twice a second
    assert "notes" in [each["collection"] for each in client.get(PATH).json()]


def test_a_worker_beside_the_service_takes_its_jobs(
    file: Path, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.src.service.background._FILE_SECONDS", 0.05)
    loaded = load(file, {("api", "job_workers"): 0, ("api", "run_schedules"): False})
    with (
        closing(Service(loaded.settings, source=source, file=file)) as service,
        closing(Service(load(file).settings, source=source, file=file)) as worker,
        serving(service) as client,
    ):
        worker.background.run(1, schedules=True)
        assert client.post(PATH, json=BLOCK).status_code == 201
        job = client.post(f"{PATH}/parts/sync", json={}).json()["job"]
        assert until_over(client, job)["state"] == "succeeded"
