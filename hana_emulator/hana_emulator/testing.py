"""Start the emulator for tests as a child process; hdbcli's calls would block it in a thread of the same process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Emulator:
    process: subprocess.Popen[str]
    host: str
    port: int
    user: str
    password: str
    schema: str
    trust_store: str | None = None  # PEM file of its certificate authority, if it uses TLS

    @property
    def tls(self) -> dict[str, Any]:
        """TLS options of hdbcli. The name is needed because the driver never matches an address with a certificate."""
        return {"encrypt": "true", "sslTrustStore": self.trust_store, "sslHostNameInCertificate": "localhost"}

    def connect(self, **options: Any) -> Any:
        """Open an hdbcli connection without autocommit and reconnect, with timeouts; `options` override them."""
        from hdbcli import dbapi

        settings = {
            "address": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "autocommit": False,
            "reconnect": "false",
            "connectTimeout": 30_000,
            "communicationTimeout": 60_000,
            **({} if self.trust_store is None else self.tls),
            **options,
        }
        return dbapi.connect(**settings)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop with a signal and return the exit code; kill after a minute."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def launch(*arguments: str) -> subprocess.Popen[str]:
    """Start `python -m hana_emulator ARGUMENTS`; it ends when this process ends, at the latest."""
    command = [sys.executable, "-m", "hana_emulator", "--parent-pid", str(os.getpid()), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def running(*arguments: str) -> Iterator[Emulator]:
    process = launch("--port", "0", *arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:  # closes the pipes
        try:
            line = process.stdout.readline()
            assert line, f"the emulator did not start: {process.stderr.read()}"
            yield Emulator(process, **json.loads(line))
        finally:
            process.kill()
