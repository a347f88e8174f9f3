"""One client's socket, plain or TLS: whole reads, whole or trickling writes, and the ways it ends."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time

_PIECE = 1 << 20
_HANDSHAKE_SECONDS = 10.0
_LAST_WORDS_SECONDS = 0.5
_RESET = struct.pack("ii", 1, 0)


class Line:
    """One thread reads, writes and closes; `cut` and `wake` may come from others.

    Ending goes past `ssl`, whose own `shutdown` would take the encryption away under a thread that still reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._wake = threading.Event()
        self._resets = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def secure(self, context: ssl.SSLContext) -> None:
        """TLS from the first byte. Raises OSError when the client speaks none, or is silent for too long."""
        self._socket.settimeout(_HANDSHAKE_SECONDS)
        secured = context.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
        self._socket = secured
        secured.do_handshake()
        secured.settimeout(None)

    def receive(self, size: int) -> bytes:
        """Exactly that many bytes. Raises OSError when the client leaves before. Memory is taken for what has come, not
        for what a header promises."""
        pieces: list[bytes] = []
        missing = size
        while missing:
            piece = self._socket.recv(min(missing, _PIECE))
            if not piece:
                raise ConnectionResetError("the client closed the connection")
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def trickle(self, data: bytes, size: int, seconds: float) -> None:
        """Send `size` bytes at a time, pausing `seconds` between. Raises OSError when the line is cut."""
        for start in range(0, len(data), size):
            if start:
                self.pause(seconds)
            self._socket.sendall(data[start : start + size])

    def pause(self, seconds: float) -> bool:
        """Wait; True when `wake` or `cut` was called since the last `begin`, or ends the wait early."""
        return self._wake.wait(seconds)

    def begin(self) -> None:
        """Forget earlier calls of `wake`: from now on they end the pauses of the request just received."""
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def cut(self) -> None:
        """End the line in both directions; pending reads and waits return. Raises OSError when it was ended."""
        self._wake.set()
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def reset_on_close(self) -> None:
        """The client shall see a reset, as from a server that died."""
        self._resets = True

    def close(self) -> None:
        """Read what the client is still sending before closing: closing over unread bytes would reset the line, and
        the client would lose the reply that says what was wrong."""
        if self._resets:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            until = time.monotonic() + _LAST_WORDS_SECONDS
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_WR)
                self._socket.settimeout(_LAST_WORDS_SECONDS)
                while socket.socket.recv(self._socket, 1 << 16) and time.monotonic() < until:
                    pass
        self._socket.close()
