"""Fixtures and settings that the tests of all three distributions share."""

from __future__ import annotations

import encodings.cp437  # noqa: F401 - for zipfile: a first look-up without free file descriptors is remembered
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings

import owl_sap_client  # noqa: F401 - before pytest names modules after the folder owl_sap_client/
from hana_emulator.testing import Emulator

_schemas = itertools.count(1)
CALM = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How long an example took says what else the machine does; Hypothesis' own profile for CI sees it so too."""
settings.register_profile("calm", CALM)
settings.load_profile("calm")
settings.register_profile("small", CALM, max_examples=10, stateful_step_count=15)
settings.register_profile("hurry", CALM, phases=(Phase.explicit, Phase.generate))
"""For scripts/mutations: a failing example is not made smaller."""

_TRANSPORTS: Any = httpx._transports.default
_new_context = _TRANSPORTS.create_ssl_context
_default_context = functools.cache(lambda *_environment: _new_context())
_TRANSPORTS.create_ssl_context = lambda verify=True, cert=None, trust_env=True: (
    # One TLS context for all clients of the default settings: to read the authorities takes longer than a request.
    _default_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if verify is True and cert is None and trust_env
    else _new_context(verify, cert, trust_env)
)

gc.disable()  # while tests are collected: a third less time


def pytest_collection_finish() -> None:
    typer_testing: Any = sys.modules.get("typer.testing")
    if typer_testing is not None:
        # One command for all runs in this process: building it takes longer than most runs.
        typer_testing._get_command = functools.cache(typer_testing._get_command)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """xdist 3.8 writes the group of a test where pytest 9.2 no longer reads it: without this, tests of one group would
    go to any process (pytest-xdist's issue 1386)."""
    for item in items:
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item._id).parse(grouped)


UNTIL = float(os.environ.get("OWL_TESTS_UNTIL", "inf"))
"""Seconds since the epoch after which no further test begins: .ci/run ends slow tests between two of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip("the time of this run is over")


@pytest.fixture(autouse=True)
def _no_late_answers_of_a_driver() -> None:
    """What one test's driver told too late is not the next test's answer."""
    if (nvml := sys.modules.get("app.src.core.nvml")) is not None:
        nvml._READINGS.clear()


@pytest.fixture(scope="session")
def emulator(hana_emulator: Emulator) -> Emulator:
    """The session's emulator, started by the plugin of the distribution hana-emulator."""
    return hana_emulator


class Administrator:
    """One connection for the schemas of all tests: a login takes longer than making a schema."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._connection: Any = None

    def execute(self, sql: str) -> None:
        if self._connection is None or not self._connection.isconnected():
            self._connection = self._emulator.connect(autocommit=True)
        self._connection.cursor().execute(sql)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@pytest.fixture(scope="session")
def administrator(emulator: Emulator) -> Iterator[Administrator]:
    administrator = Administrator(emulator)
    yield administrator
    administrator.close()


@pytest.fixture
def hana_schema(administrator: Administrator) -> Iterator[str]:
    """The name of a new, empty schema in the emulator, dropped afterwards."""
    name = f"TEST_{next(_schemas)}"
    administrator.execute(f'CREATE SCHEMA "{name}"')
    yield name
    administrator.execute(f'DROP SCHEMA "{name}" CASCADE')


@pytest.fixture
def hana(emulator: Emulator, hana_schema: str) -> Iterator[Any]:
    """A new hdbcli connection (autocommit off, no reconnecting) whose current schema is `hana_schema`."""
    connection = emulator.connect(currentSchema=hana_schema)
    yield connection
    connection.close()
