"""Every error of ours, found by walking the classes, has its exit code, its HTTP status and a message for people."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from app.src.api import errors as api_errors
from app.src.benchmark import harness
from app.src.cli import exits
from app.src.core import backends
from app.src.core.finetune import recipe
from app.src.core.onnx_export import optimizer, serving
from app.src.jobs.journal import JobOver, JobRunning, QueueFull, StateUnusable, UnknownJob
from app.src.settings import SettingsError
from connector import errors

ALSO_LOADED = (harness, optimizer, recipe, serving)
"""Nothing else that is imported here imports them, and their errors count."""
CANARY = "canary-5358"

# class -> exit code, HTTP status, retryable. One line for each class there is.
TABLE: dict[str, tuple[int, int, bool]] = {
    "ConnectorError": (4, 500, False),
    "AccessUnusable": (2, 500, False),
    "ConfigurationError": (2, 500, False),
    "UnknownTable": (2, 500, False),
    "UnknownColumn": (2, 500, False),
    "NoKey": (2, 500, False),
    "BadFilter": (2, 422, False),
    "ModelMismatch": (2, 409, False),
    "UnknownCollection": (2, 404, False),
    "NoProposal": (2, 500, False),
    "NotPreviewable": (2, 422, False),
    "WrongOrigin": (2, 409, False),
    "CollectionExists": (2, 409, False),
    "NotSaved": (2, 409, False),
    "BadDocument": (2, 422, False),
    "LogMissing": (2, 500, False),
    "UnknownKey": (2, 404, False),
    "UnknownRow": (2, 404, False),
    "UnknownGeneration": (2, 404, False),
    "DatabaseError": (3, 503, False),
    "ConnectionLost": (3, 503, True),
    "Unavailable": (3, 503, True),
    "ConnectFailed": (3, 503, False),
    "Unreachable": (3, 503, True),
    "LoginRefused": (3, 503, False),
    "PermissionRefused": (3, 503, False),
    "TransactionRolledBack": (3, 503, True),
    "Overloaded": (3, 503, True),
    "SchemaChanged": (3, 503, False),
    "Cancelled": (3, 503, False),
    "StatementFailed": (3, 503, False),
    "RerankFailed": (3, 503, False),
    "RowRejected": (1, 500, False),
    "RowsRejected": (1, 500, False),
    "TextsNotEmbeddable": (1, 422, False),
    "StoreCorrupt": (3, 500, False),
    "LeaseLost": (3, 409, False),
    "GenerationRefused": (1, 409, False),
    "GenerationChanged": (3, 503, True),
    "SyncPaused": (1, 409, False),
    "PeerUnavailable": (2, 500, False),
    "EngineError": (4, 500, False),
    "ModelNotFound": (2, 500, False),
    "ModelUnsupported": (2, 500, False),
    "WeightsMismatch": (2, 500, False),
    "DeviceUnavailable": (2, 500, False),
    "OutOfMemory": (4, 503, True),
    "DeviceFailed": (4, 503, False),
    "EngineClosed": (4, 503, False),
    "EngineOverloaded": (4, 429, True),
    "WorkerDied": (4, 503, True),
    "NonFinite": (1, 422, False),
    "NotAsGraph": (2, 500, False),
    "TooFewTexts": (1, 500, False),
    "TrainingFailed": (1, 500, False),
}


def classes(root: type[BaseException]) -> list[type[BaseException]]:
    found = [root]
    for kind in root.__subclasses__():
        found += classes(kind)
    return [kind for kind in dict.fromkeys(found) if kind.__module__.split(".")[0] in ("app", "connector")]


OURS = classes(errors.ConnectorError) + classes(backends.EngineError)


def instance(kind: type[Any], text: str) -> Any:
    """One of them, whatever its constructor wants."""
    wanted = inspect.signature(kind.__init__).parameters
    if kind is backends.NonFinite:
        return kind([0])
    arguments = {"index": 0, "indices": [0], "reason": "r", "toml": "", "rows": {0: errors.RowRejected("r")}}
    more = {name: value for name, value in arguments.items() if name in wanted}
    return kind(text, **more)


def status_of(error: Exception) -> int:
    if isinstance(error, api_errors.Refused):
        return api_errors.KINDS[error.kind]
    return next((api_errors.STATUS[kind] for kind in type(error).__mro__ if kind in api_errors.STATUS), 500)


def test_the_table_has_every_class() -> None:
    assert {kind.__name__ for kind in OURS} == set(TABLE)
    assert len(OURS) == len(TABLE), "two classes share a name"


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_code_status_and_message(kind: type[Any]) -> None:
    code, status, retryable = TABLE[kind.__name__]
    error = instance(kind, "the table is gone")
    assert (exits.exit_code(error), status_of(error), error.retryable) == (code, status, retryable)
    assert exits.message(error) == str(error), "it was written for people"
    assert "finite vector" in str(error) if kind is backends.NonFinite else str(error) == "the table is gone"


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_a_pickled_error_keeps_its_attributes(kind: type[Any]) -> None:
    """Errors travel from the workers of a cluster and from child processes."""
    error = instance(kind, "the table is gone")
    error.more = {1: "some"}
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), found.args, repr(vars(found))) == (kind, error.args, repr(vars(error)))


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_a_class_that_comes_later_inherits_both(kind: type[Any]) -> None:
    later = type("Later", (kind,), {"__init__": lambda self: Exception.__init__(self, "x")})()
    code, status, _ = TABLE[kind.__name__]
    assert status_of(later) == status
    assert exits.exit_code(later) == code
    assert exits.message(later) == "x"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (SettingsError("x"), 2, 500),
        (exits.UsageFault("x"), 2, 500),
        (JobRunning("a", "j"), 3, 409),
        (UnknownJob("x"), 2, 404),
        (JobOver("x"), 1, 409),
        (QueueFull("x"), 3, 429),
        (StateUnusable("x"), 2, 503),
        (api_errors.Refused("TooManyStreams", "x"), 4, 429),
        (api_errors.Refused("Unprocessable", "x"), 4, 422),
        (api_errors.Refused("TooMuch", "x"), 4, 413),
        (ValueError("x"), 4, 500),
        (MemoryError(), 4, 500),
        (OSError("x"), 4, 500),
        (AssertionError("x"), 4, 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_outside_the_two_trees(error: Exception, code: int, status: int) -> None:
    assert (exits.exit_code(error), status_of(error)) == (code, status)


@pytest.mark.parametrize("error", [KeyError(CANARY), ValueError(CANARY), OSError(CANARY), RuntimeError(CANARY)])
def test_texts_of_strangers_are_not_told(error: Exception) -> None:
    assert CANARY not in exits.message(error)
    assert type(error).__name__ in exits.message(error)
    assert "--debug" in exits.message(error)


def test_codes_of_the_interface() -> None:
    assert (exits.OK, exits.FAILED, exits.USAGE, exits.UNAVAILABLE, exits.UNEXPECTED) == (0, 1, 2, 3, 4)
    assert (exits.INTERRUPTED, exits.TERMINATED) == (130, 143)
    assert {code for code, _, _ in TABLE.values()} == {1, 2, 3, 4}


def test_whatever_may_be_retried_is_503_with_retry_after() -> None:
    retryable = {kind.__name__ for kind in OURS if getattr(kind, "retryable", False)}
    assert retryable == {name for name, (_, _, again) in TABLE.items() if again}
    assert {TABLE[name][1] for name in retryable} == {429, 503}
