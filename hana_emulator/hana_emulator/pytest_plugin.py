"""Fixtures for the tests of programs that connect to HANA: `hana_emulator` starts one emulator for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hana_emulator.testing import Emulator, running


@pytest.fixture(scope="session")
def hana_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """Run an emulator as a child process and yield its address and login; `connect()` gives an hdbcli connection.

    One process for the whole session, with a data folder of its own and the empty schema SAPDEMO.
    """
    with running("--data", str(tmp_path_factory.mktemp("hana-emulator"))) as emulator:
        yield emulator
        assert emulator.process.poll() is None, "the emulator died during the tests"
        assert emulator.stop() == 0
