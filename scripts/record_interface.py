"""Record what users of the product can see, as files that two versions of it can be compared by.

    .venv/bin/python scripts/record_interface.py FOLDER     # then: diff -r FOLDER OTHER

Starts the emulator with sample data and `owl-sap serve` as child processes of the code in the working directory, and
writes into FOLDER: the CLI's help of every verb, the settings' JSON schema, the shapes of `--json` and REST answers,
OpenAPI, the MCP tools, the names of the metrics, and the SQL statements that were sent to the emulator. Values that
change from run to run are left out: an answer is recorded by the types of its members.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hana_emulator.testing import running

CONFIGURATION = """
[hana]
host = "{hana.host}"
port = {hana.port}
user = "{hana.user}"
encrypt = false
[store]
kind = "{kind}"
{store}
[state]
path = "{folder}/state"
[embedding]
model = "hash:64"
[mcp]
http = {mcp}
[[collections]]
name = "materials"
source = "SAPDEMO.V_MATERIALS"
key = ["MANDT", "MATNR", "SPRAS"]
where = "MANDT = '100'"
template = "{{MAKTX}}. {{LTEXT}}"
metadata = ["MTART", "STPRS", "ERSDA"]
[[collections]]
name = "notes"
documents = true
metadata = ["kind"]
"""
KEEPING_STATEMENTS = """
import hdbcli.dbapi, runpy, sys
path = sys.argv.pop(1)
class Recorder:
    def __init__(self, wrapped): self.__dict__["wrapped"] = wrapped
    def __getattr__(self, name):
        value = getattr(self.wrapped, name)
        if name == "cursor": return lambda *a, **k: Recorder(value(*a, **k))
        if name in ("execute", "executemany", "prepare"):
            def recorded(sql, *a, **k):
                with open(path, "a") as out: out.write(" ".join(sql.split()) + chr(10))
                return value(sql, *a, **k)
            return recorded
        return value
    def __setattr__(self, name, value): setattr(self.wrapped, name, value)
    def __enter__(self): return self
    def __exit__(self, *_): self.wrapped.close()
connect = hdbcli.dbapi.connect
hdbcli.dbapi.connect = lambda *a, **k: Recorder(connect(*a, **k))
sys.argv[0] = "owl-sap"
runpy.run_module("app", run_name="__main__")
"""
# Record the tools of agents if the extra is installed.
WITH_MCP = importlib.util.find_spec("mcp") is not None
JOBS = ("GET", "/v1/jobs", None)
JSON_VERBS = [
    "tables",
    "introspect SAPDEMO.MARA",
    "plan materials",
    "sync materials",
    "sync materials",
    "verify materials",
    "search materials chair -k 2",
    'search materials chair -k 2 --mode vector --filter {"MTART":"FERT"}',
    "search materials chair -k 2 --mode keyword",
    "status",
    "generations materials",
    "quarantine list materials",
    "grants",
    "config show",
    "doctor",
    "jobs list",
    "sync nothing",
    'search materials chair --filter {"X":{"$foo":1}}',
    "rows materials",
    "explain OWL-2005",
]
REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/health/live", None),
    ("GET", "/health/ready", None),
    ("GET", "/v1/info", None),
    ("GET", "/v1/gpu", None),
    ("GET", "/v1/tables", None),
    ("GET", "/v1/tables/SAPDEMO/MARA", None),
    ("GET", "/v1/collections", None),
    ("GET", "/v1/collections/materials", None),
    ("GET", "/v1/collections/absent", None),
    ("POST", "/embed", {"inputs": ["a", "b"]}),
    ("POST", "/embed", {"inputs": 1}),
    ("POST", "/v1/embeddings", {"input": "a", "model": "hash:64"}),
    ("POST", "/v1/embeddings", {"input": "a", "model": "other"}),
    ("POST", "/rerank", {"query": "a", "documents": ["a", "b"]}),
    ("POST", "/v1/rerank", {"query": "a", "documents": []}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2, "mode": "keyword"}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2, "mode": "vector", "mmr_lambda": 0.5}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "filter": {"X": {"$foo": 1}}}),
    ("GET", "/v1/collections/materials/quarantine", None),
    ("GET", "/v1/collections/materials/generations", None),
    ("POST", "/v1/collections/materials/sync", {}),
    JOBS,
    ("GET", "/v1/jobs/absent", None),
]


def shape(value: Any) -> Any:
    """Return the types of a JSON value's members; for a list, those of its first member."""
    if isinstance(value, dict):
        return {name: shape(member) for name, member in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__ if value is not None else "null"


def dump(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def output_of(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "app", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def ask(url: str, method: str, path: str, body: Any, accept: str = "application/json") -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept": accept}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def serving(environment: dict[str, str], config: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "app", "--config", str(config), "serve", "--port", "0"]
    serve = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert serve.stdout is not None
        yield json.loads(serve.stdout.readline())["url"]
    finally:
        serve.terminate()
        serve.wait(60)


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running("--data", f"{folder}/emulator", "--sample") as emulator:
        environment = os.environ | {
            "HANA_PASSWORD": emulator.password,
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONPATH": os.getcwd(),
        }
        found = ""
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            path = waiting.pop(0)
            text = output_of(environment, *path, "--help")
            found += f"$ owl-sap {' '.join(path)} --help\n{text}\n"
            for panel in text.split("╭")[1:]:
                title = panel.partition("\n")[0]
                if (not path or "Commands" in title) and "ptions" not in title:
                    waiting += [(*path, name) for name in re.findall(r"^│ ([a-z][\w-]*) {2,}", panel, re.MULTILINE)]
        (out / "help.txt").write_text(found)
        (out / "config-schema.json").write_text(dump(json.loads(output_of(environment, "config", "schema"))))
        for kind in ("local", "hana"):  # of the store
            home = Path(folder, kind)
            home.mkdir()
            store = f'schema = "{emulator.schema}"' + (f'\npath = "{home}/vectors"' if kind == "local" else "")
            text = CONFIGURATION.format(mcp=str(WITH_MCP).lower(), kind=kind, store=store, folder=home, hana=emulator)
            (home / "owl-sap.toml").write_text(text)
            # The answers of the verbs, and the distinct statements without changing literals.
            statements, lines = out / f"statements-{kind}.txt", []
            command = [sys.executable, "-c", KEEPING_STATEMENTS, str(statements), "--config", f"{home}/owl-sap.toml"]
            for verb in JSON_VERBS:
                arguments = [*command, *verb.split(" "), "--json"]
                done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
                try:
                    answer = shape(json.loads(done.stdout))
                except ValueError:
                    answer = done.stdout[:200] or "(nothing)"
                errors = re.sub(r"[\d.]+|/\S+", "#", done.stderr) if done.returncode else ""
                lines.append(dump({"verb": verb, "exit": done.returncode, "answer": answer, "error": errors}))
            (out / f"json-{kind}.txt").write_text("".join(lines))
            sent = re.sub(r"(?<![\w$])\d+(?![\w$])|[0-9A-F]{12}", "#", statements.read_text())
            statements.write_text("\n".join(sorted(set(sent.splitlines()))) + "\n")
        with serving(environment, Path(folder, "local", "owl-sap.toml")) as url:
            lines = []
            for method, route, body in REQUESTS:
                status, text = ask(url, method, route, body)
                answer = shape(document := json.loads(text))
                if status >= 400:
                    answer = {name: document.get(name) for name in ("title", "code", "detail")} | {"shape": answer}
                lines.append(
                    dump({"request": f"{method} {route} {json.dumps(body)}", "status": status, "answer": answer})
                )
            (out / "rest.txt").write_text("".join(lines))
            while any(job["state"] in ("queued", "running", "waiting") for job in json.loads(ask(url, *JOBS)[1])):
                time.sleep(0.2)  # metrics appear when the first job ends
            (out / "openapi.json").write_text(dump(json.loads(ask(url, "GET", "/openapi.json", None)[1])))
            names = re.findall("^# TYPE .*$", ask(url, "GET", "/metrics", None, "text/plain")[1], re.MULTILINE)
            (out / "metrics.txt").write_text("\n".join(sorted(names)) + "\n")
            if WITH_MCP:
                listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
                _, text = ask(url, "POST", "/mcp", listing, "application/json, text/event-stream")
                (out / "mcp-tools.json").write_text(dump(json.loads(text[text.index("{") : text.rindex("}") + 1])))


if __name__ == "__main__":
    main()
