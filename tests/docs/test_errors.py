"""docs/errors.md: every error of ours with its exit code, HTTP status and what to do, and every code of HANA that is
told apart; written from the classes and the tables that decide. After a change of the code write it anew:
OWL_WRITE_DOCS=1 ./scripts/test tests/docs/test_errors.py
"""

from __future__ import annotations

import inspect
import re
from http import HTTPStatus

import pytest

from app.src.api import errors as http_errors
from app.src.cli import exits
from app.src.core import backends
from app.src.core.finetune import recipe
from app.src.core.onnx_export import optimizer, serving
from connector import errors
from tests.docs.sections import check_section

ALSO_LOADED = (optimizer, recipe, serving)
"""Nothing else that is imported here imports them, and their errors count."""
ADVICE = {
    "UsageFault": "read the message: it says what to type instead",
    "SettingsError": "correct the setting that the message names; `owl-sap config show --origin` says where it is from",
    "ConnectorError": "one of those below",
    "DatabaseError": "one of those below",
    "ConfigurationError": "correct the setting that the message names",
    "UnknownTable": "check the name (case counts) and SELECT on it: HANA hides what a user may not see",
    "UnknownColumn": "check `template`, `metadata`, `key`; `owl-sap introspect` shows the columns",
    "NoKey": "name `key`: columns that together are unique",
    "LogMissing": "`owl-sap changes install NAME`; the next run compares everything",
    "BadFilter": "correct the filter ([search.md](search.md))",
    "ModelMismatch": "bring the model back, or build a generation with the new one ([generations.md](generations.md))",
    "UnknownCollection": "check the name: `owl-sap status`",
    "UnknownKey": "`owl-sap quarantine list NAME` shows the keys there are",
    "UnknownRow": "take the id from a hit of this collection; with row rights, ask as somebody who may see the row",
    "UnknownGeneration": "`owl-sap generations NAME` shows those there are",
    "NoProposal": "write the `[[collections]]` block by hand: the message says what the table lacks",
    "ConnectionLost": "nothing, if it passes; else network and HANA: `owl-sap doctor`",
    "Unavailable": "wait: maintenance, or the instance is starting; start a stopped HANA Cloud instance",
    "ConnectionMisconfigured": "correct address, port, TLS or trust store: `owl-sap doctor` tells them apart",
    "LoginRefused": "correct user or password **before** anything tries again, then restart the service "
    "([HanaLoginRefused](operations.md#alert-hana-login-refused))",
    "PermissionRefused": "run what `owl-sap grants` prints",
    "TransactionRolledBack": "nothing: it was tried again; if it stays, somebody holds locks",
    "Overloaded": "less at a time (`sync.window`, `sync.readers`), or a higher statement memory limit in HANA",
    "SchemaChanged": "look what became of the table; `sync NAME --accept-schema` if it is meant",
    "Cancelled": "nothing: it was asked for",
    "StatementFailed": "the message has HANA's code; `SYS.M_ERROR_CODES` says what it means; please report it",
    "RowRejected": "mend the row; see [quarantine.md](quarantine.md)",
    "RowsRejected": "as RowRejected, for some rows of a batch",
    "TextsNotEmbeddable": "look at the rows in quarantine; another `precision`, or another model",
    "StoreCorrupt": "restore the backup, or delete the folder and sync ([disasters](operations.md#disasters))",
    "LeaseLost": "nothing: another process writes the collection; run it again",
    "GenerationRefused": "do first what the message says",
    "GenerationChanged": "nothing: asked again by itself; if a client sees it, ask again",
    "SyncPaused": "look at the source before you go on ([SyncPaused](operations.md#alert-sync-paused))",
    "EngineError": "the message says what; please report it",
    "ModelNotFound": "check the name; fetch it, or give a folder (`embedding.model`)",
    "ModelUnsupported": "take another model: the message says what this one has or lacks",
    "WeightsMismatch": "the files are not those that were pinned: fetch them anew, and ask why they differ",
    "DeviceUnavailable": "`owl-sap doctor`: driver, torch and card",
    "NotAsGraph": "`tensorrt.enabled = false`, or do what the message says",
    "OutOfMemory": "less for others on the card, `embedding.memory_fraction`; batches have been made smaller already",
    "EngineClosed": "nothing: the process is ending; ask another",
    "EngineOverloaded": "wait as long as `Retry-After` says; more processes or a faster device",
    "WorkerDied": "restart the process; the log has the reason; please report it",
    "NonFinite": "another `precision`, or another model: this one gives no numbers for such texts",
    "TooFewTexts": "calibrate with a collection that has more rows",
    "TrainingFailed": "change what the message says",
    "JobRunning": "wait for the job that the message names, or cancel it",
    "JobOver": "nothing: it is over",
    "QueueFull": "wait; or more workers, or `state.max_queued`",
    "StateUnusable": "make the state folder writable for this user ([jobs.md](jobs.md))",
    "UnknownJob": "`owl-sap jobs`; old records go after `state.keep_days`",
    "Unprocessable": "correct the request: the answer says which part",
    "TooMuch": "send less: the answer names the limit",
    "BadRequest": "correct the request",
    "UnknownModel": "leave `model` out, or name the one of `GET /v1/models`",
    "NotFound": "check the path; where a collection or a table is named, the answer has the nearest names",
    "TooManyStreams": "follow fewer jobs at once",
    "Crowded": "wait as long as `Retry-After` says",
    "ClientLeft": "nothing: nobody waits for the answer",
}


def errors_table() -> str:
    lines = ["| error | exit | HTTP | tried again | what to do |", "|---|---|---|---|---|"]
    for kind in _classes():
        again = "yes" if getattr(kind, "retryable", False) else ""
        lines.append(f"| `{kind.__name__}` | {_exit(kind)} | {_status(kind)} | {again} | {_advice(kind)} |")
    return "\n".join(lines)


def codes_table() -> str:
    lines = ["| code | and the text has | error | what it means | what to do |", "|---|---|---|---|---|"]
    for rule in errors.RULES:
        codes = ", ".join(str(code) for code in sorted(rule.codes, key=lambda code: (code < 0, abs(code)))) or "any"
        texts = ", ".join(f'"{text}"' for text in rule.texts)
        cells = (codes, texts, f"`{rule.error.__name__}`", rule.meaning, rule.next_step)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def statuses_table() -> str:
    told: dict[int, list[str]] = {}
    for kind, status in http_errors.STATUS:
        told.setdefault(status, []).append(f"`{kind.__name__}`")
    lines = ["| status | | from |", "|---|---|---|"]
    for status in sorted(told):
        phrase = "the client has left" if status == http_errors.CLIENT_LEFT else HTTPStatus(status).phrase
        lines.append(f"| {status} | {phrase} | {', '.join(told[status])} |")
    return "\n".join(lines)


def _classes() -> list[type[Exception]]:
    """Both trees, then what else the tables of exit codes and statuses name."""
    found: list[type[Exception]] = []

    def place(kind: type[Exception]) -> tuple[str, str]:
        return kind.__module__, kind.__qualname__

    def walk(kind: type[Exception]) -> None:
        # By name: a test that imports a module anew makes its classes twice, and the order is that of the imports.
        known = {place(each) for each in found}
        if place(kind) not in known and kind.__module__.split(".")[0] in ("app", "connector"):
            found.append(kind)
        for lower in sorted(kind.__subclasses__(), key=place):
            walk(lower)

    for root in (errors.ConnectorError, backends.EngineError):
        walk(root)
    for kind, _ in (*exits.CODES, *http_errors.STATUS):
        walk(kind)
    return [kind for kind in found if not kind.__module__.startswith("app.src.benchmark")]


def _exit(kind: type[Exception]) -> int | str:
    # A refusal of REST alone never ends a command.
    if issubclass(kind, http_errors.Refused):
        return ""
    known = next((code for known, code in exits.CODES if issubclass(kind, known)), None)
    return known if known is not None else exits.ENGINE_CODES.get(kind.__name__, exits.UNEXPECTED)


def _status(kind: type[Exception]) -> int:
    return next((status for known, status in http_errors.STATUS if issubclass(kind, known)), http_errors.CRASHED)


def _advice(kind: type[Exception]) -> str:
    own = inspect.cleandoc(kind.__doc__ or "") if "__doc__" in vars(kind) else ""
    return ADVICE.get(kind.__name__) or re.split(r"\.\s", own.replace("\n", " "))[0].rstrip(".")


TABLES = {"errors": errors_table, "hana codes": codes_table, "statuses": statuses_table}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_what_the_code_does(name: str) -> None:
    wanted = TABLES[name]()
    assert len(wanted.splitlines()) > 10
    check_section("docs/errors.md", name, wanted, "tests/docs/test_errors.py")


def test_every_error_says_what_to_do() -> None:
    assert [kind.__name__ for kind in _classes() if not _advice(kind)] == []


def test_no_advice_is_for_an_error_that_is_gone() -> None:
    assert set(ADVICE) - {kind.__name__ for kind in _classes()} == set()
