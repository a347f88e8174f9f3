"""Plugin of `./scripts/test fast`: keep the tests that need no process, server, browser or model.

It reads the code of each test, of its fixtures and of the helpers in tests/ that they call; no list has to be kept.
A kept test that starts a process all the same fails, and takes the mark `not_fast`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES_MAX = 10
# A test whose code holds one of these names or texts is not fast.
SLOW_NAMES = frozenset(
    {
        *("subprocess", "Popen", "create_subprocess_exec", "multiprocessing", "fork", "posix_spawn", "start_process"),
        *("PeerProcess", "StdioServerParameters", "StdioTransport"),
        *(
            "uvicorn",
            "PromptServer",
            "serve_forever",
            "sync_playwright",
            "SentenceTransformer",
            "sentence_transformers",
        ),
        *("find_folder", "all-MiniLM-L6-v2", "use-multilingual", "multilingual-e5-small", "cross_encoder_folder"),
    }
)
ROOT = str(Path(__file__).resolve().parents[1])
OWN_FILES = (
    "tests/",
    "conftest.py",
    "hana_emulator/tests/",
    "hana_emulator/hana_emulator/testing.py",
    "hana_emulator/hana_emulator/pytest_plugin.py",
    "owl_sap_client/tests/",
)
# Collected only where named on the command line: nearly all of their tests are slow, and importing them takes seconds.
# The emulator is a distribution of its own; `./scripts/test fast hana_emulator/tests` is its fast lane.
LEFT_OUT = (
    *("hana_emulator/tests", "tests/adversity", "tests/console", "tests/e2e"),
    *("tests/training/test_trainer.py", "tests/api/test_schemathesis.py", "tests/client/test_langchain.py"),
)
PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})
# Python asks these programs where libraries are and which machine this is, the benchmarks ask git for the version.
HARMLESS = ("git", "ldconfig", "gcc", "cc", "ld", "uname", "lsb_release", "objdump")

_running: list[str] = []


def is_own(code: CodeType) -> bool:
    return code.co_filename.removeprefix(ROOT + "/").startswith(OWN_FILES)


def functions_of(value: object) -> Iterator[FunctionType]:
    """Yield the functions behind a name: the function itself, or the methods of a class."""
    value = getattr(value, "__wrapped__", value)
    value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
    value = getattr(value, "_fixture_function", value)
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, type):
        for member in vars(value).values():
            inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
            inner = getattr(inner, "__wrapped__", inner)
            if isinstance(inner, FunctionType):
                yield inner


def parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts(constant)


@functools.cache
def named_in(function: FunctionType) -> tuple[bool, list[FunctionType]]:
    """Return whether the function itself holds a slow name, and the functions of the tests that it names."""
    if not is_own(function.__code__):
        return False, []
    codes = list(parts(function.__code__))
    names = {name for code in codes for name in code.co_names}
    texts = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += [vars(value).get(name) for value in values if isinstance(value, ModuleType) for name in names]
    texts |= {value for value in values if isinstance(value, str)}
    return not SLOW_NAMES.isdisjoint(names | texts), [each for value in values for each in functions_of(value)]


@functools.cache
def is_slow(function: FunctionType) -> bool:
    """Return whether the function, or a helper of the tests that it calls, needs more than this process."""
    seen, waiting = {function}, [function]
    while waiting:
        slow, called = named_in(waiting.pop())
        if slow:
            return True
        waiting += [each for each in called if each not in seen]
        seen.update(called)
    return False


def needs_more_than_this_process(item: pytest.Function) -> bool:
    if item.get_closest_marker("not_fast") or item.get_closest_marker("slow"):
        return True
    fixtures = [each.func for defs in item._fixtureinfo.name2fixturedefs.values() for each in defs]
    own = [item.obj, *([item.cls] if item.cls else [])]
    return any(is_slow(function) for value in [*own, *fixtures] for function in functions_of(value))


def with_few_examples(chosen: Any) -> Any:
    return settings(chosen, max_examples=min(EXAMPLES_MAX, chosen.max_examples), stateful_step_count=15)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = f"{collection_path}/".startswith(tuple(f"{ROOT}/{path}/" for path in LEFT_OUT))
    return True if left_out and config.args_source is not pytest.Config.ArgsSource.ARGS else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        keep = not isinstance(item, pytest.Function) or not needs_more_than_this_process(item)
        (fast if keep else left_out).append(item)
    for item in fast:
        test: Any = getattr(item, "obj", None)
        if chosen := getattr(test, "_hypothesis_internal_use_settings", None):
            test._hypothesis_internal_use_settings = with_few_examples(chosen)
        case: Any = getattr(item, "cls", None)
        if isinstance(chosen := getattr(case, "settings", None), settings):
            case.settings = with_few_examples(chosen)
    items[:] = fast
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> None:
    """Skip a test that asks for a slow fixture only while it runs, by `request.getfixturevalue`."""
    if any(is_slow(function) for function in functions_of(fixturedef.func)):
        skipped = pytest.skip.Exception(f"not in the fast lane: needs {fixturedef.argname}")
        fixturedef.cached_result = (None, fixturedef.cache_key(request), (skipped, None))
        raise skipped


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.pop()


def no_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event in PROCESS_EVENTS and _running:
        program = str(arguments[0]).rpartition("/")[2] if arguments else ""
        if program not in HARMLESS:
            pytest.fail(f"{_running[-1]} starts a process ({event} {program}): give it the mark `not_fast`")


sys.addaudithook(no_process)
