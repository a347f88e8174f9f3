"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_LOWEST, _BEHIND = 20_000, 32_000
"""Below those that systems give to whoever asks for any (Linux from 32768 on): until the server has started nobody else
comes to have it by chance."""


def free_port() -> int:
    """One of this machine that nobody listens on."""
    chance = random.SystemRandom()  # not the tests' own, which may begin alike in two processes
    while True:
        port = chance.randrange(_LOWEST, _BEHIND)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
