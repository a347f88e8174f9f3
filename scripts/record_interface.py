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
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CONFIGURATION = """
[hana]
host = "{host}"
port = {port}
user = "{user}"
encrypt = false
[store]
kind = "{kind}"
path = "{folder}/vectors"
schema = "{schema}"
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
# Agents are an extra: without it there are no tools to record.
WITH_MCP = importlib.util.find_spec("mcp") is not None
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
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2, "mode": "keyword"}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "k": 2, "mode": "vector", "mmr_lambda": 0.5}),
    ("POST", "/v1/collections/materials/search", {"query": "chair", "filter": {"X": {"$foo": 1}}}),
    ("GET", "/v1/collections/materials/quarantine", None),
    ("GET", "/v1/collections/materials/generations", None),
    ("POST", "/v1/collections/materials/sync", {}),
    ("GET", "/v1/jobs", None),
    ("GET", "/v1/jobs/absent", None),
]


def shape(value: Any) -> Any:
    """Return the types of a JSON value's members; a list by the shape of its first member."""
    if isinstance(value, dict):
        return {name: shape(member) for name, member in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__ if value is not None else "null"


def dump(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


class Recording:
    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = out, folder
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "hana_emulator", "--port", "0", "--data", str(folder / "hana"), "--sample"]
        self.emulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.emulator.stdout is not None
        self.greeting = json.loads(self.emulator.stdout.readline())

    def environment(self, kind: str) -> dict[str, str]:
        """Write the settings of a store of `kind` and return the environment to run our command in."""
        home = self.folder / kind
        home.mkdir(exist_ok=True)
        text = CONFIGURATION.format(mcp=str(WITH_MCP).lower(), kind=kind, folder=home, **self.greeting)
        (home / "owl-sap.toml").write_text(text if kind == "local" else text.replace("path", "path", 1))
        if kind == "hana":
            lines = (line for line in text.splitlines() if not line.endswith('/vectors"'))
            (home / "owl-sap.toml").write_text("\n".join(lines))
        return os.environ | {
            "HANA_PASSWORD": self.greeting["password"],
            "OWL_SAP_CONFIG": str(home / "owl-sap.toml"),
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONPATH": os.getcwd(),
        }

    def run(self, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        config = ["--config", str(self.folder / kind / "owl-sap.toml")]
        command = [sys.executable, "-c", KEEPING_STATEMENTS, str(self.out / f"statements-{kind}.txt"), *config]
        return subprocess.run(
            [*command, *arguments], env=self.environment(kind), capture_output=True, text=True, check=False
        )

    def help(self) -> None:
        environment = self.environment("local")
        found = ""
        waiting: list[list[str]] = [[]]
        while waiting:
            path = waiting.pop(0)
            command = [sys.executable, "-m", "app", *path, "--help"]
            text = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
            found += f"$ owl-sap {' '.join(path)} --help\n{text}\n"
            inside = False
            for line in text.splitlines():
                if line.startswith("╭"):
                    inside = not path or "Commands" in line
                    inside = inside and "ptions" not in line
                match = re.match(r"│ ([a-z][\w-]*) {2,}", line)
                if inside and match:
                    waiting.append([*path, match[1]])
        (self.out / "help.txt").write_text(found)
        done = subprocess.run(
            [sys.executable, "-m", "app", "config", "schema"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        (self.out / "config-schema.json").write_text(dump(json.loads(done.stdout)))

    def verbs(self, kind: str) -> None:
        lines = []
        for verb in JSON_VERBS:
            done = self.run(kind, *verb.split(" "), "--json")
            try:
                answer = shape(json.loads(done.stdout))
            except ValueError:
                answer = done.stdout[:200] or "(nothing)"
            errors = re.sub(r"[\d.]+|/\S+", "#", done.stderr) if done.returncode else ""
            lines.append(dump({"verb": verb, "exit": done.returncode, "answer": answer, "error": errors}))
        (self.out / f"json-{kind}.txt").write_text("".join(lines))

    def service(self) -> None:
        command = [
            sys.executable,
            "-m",
            "app",
            "--config",
            str(self.folder / "local" / "owl-sap.toml"),
            "serve",
            "--port",
            "0",
        ]
        serve = subprocess.Popen(
            command, env=self.environment("local"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert serve.stdout is not None
            url = json.loads(serve.stdout.readline())["url"]
            lines = []
            for method, path, body in REQUESTS:
                status, answer = self.ask(url, method, path, body)
                lines.append(
                    dump({"request": f"{method} {path} {json.dumps(body)}", "status": status, "answer": answer})
                )
            (self.out / "rest.txt").write_text("".join(lines))
            with urllib.request.urlopen(url + "/openapi.json") as answer:
                (self.out / "openapi.json").write_text(dump(json.loads(answer.read())))
            with urllib.request.urlopen(url + "/metrics") as answer:
                text = answer.read().decode()
            names = sorted(line for line in text.splitlines() if line.startswith("# TYPE "))
            (self.out / "metrics.txt").write_text("\n".join(names) + "\n")
            if WITH_MCP:
                (self.out / "mcp-tools.json").write_text(dump(self.tools(url)))
        finally:
            serve.terminate()
            serve.wait(60)

    def ask(self, url: str, method: str, path: str, body: Any) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, shape(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            document = json.loads(error.read())
            return error.code, {name: document.get(name) for name in ("title", "code", "detail")} | {
                "shape": shape(document)
            }

    def tools(self, url: str) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        request = urllib.request.Request(url + "/mcp", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return {"status": error.code, "body": error.read().decode()}
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    def statements(self) -> None:
        """Reduce each file of statements to its distinct ones, without the literals that change."""
        for path in self.out.glob("statements-*.txt"):
            lines = {
                re.sub(r"(?<![\w$])\d+(?![\w$])|[0-9A-F]{12}", "#", line) for line in path.read_text().splitlines()
            }
            path.write_text("\n".join(sorted(lines)) + "\n")


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(out, Path(folder))
        try:
            recording.help()
            for kind in ("local", "hana"):
                recording.verbs(kind)
            recording.service()
            recording.statements()
        finally:
            recording.emulator.terminate()
            recording.emulator.wait(60)


if __name__ == "__main__":
    main()
