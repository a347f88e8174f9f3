"""One client's socket, plain or TLS: full reads, full or slow writes, and shutdown."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time

_PIECE = 1 << 20
_HANDSHAKE_SECONDS = 10.0
_DRAIN_SECONDS = 0.5
_RESET = struct.pack("ii", 1, 0)


class Line:
    """One thread reads, writes and closes; other threads may call `cut` and `wake`.

    `SSLSocket.shutdown` would drop the encryption while a thread still reads, so `socket.shutdown` is called instead.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._wake = threading.Event()
        self._resets = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def secure(self, context: ssl.SSLContext) -> None:
        """Start TLS. Raises OSError if the client does not use TLS or is silent for too long."""
        self._socket.settimeout(_HANDSHAKE_SECONDS)
        secured = context.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
        self._socket = secured
        secured.do_handshake()
        secured.settimeout(None)

    def receive(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises OSError if the client disconnects. Allocates only for bytes received."""
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
        """Send `size` bytes at a time with pauses of `seconds`. Raises OSError after `cut`."""
        for start in range(0, len(data), size):
            if start:
                self.pause(seconds)
            self._socket.sendall(data[start : start + size])

    def pause(self, seconds: float) -> bool:
        """Wait; return True as soon as `wake` or `cut` has been called since the last `begin`."""
        return self._wake.wait(seconds)

    def begin(self) -> None:
        """Clear earlier calls of `wake`; later ones end the pauses of the current request."""
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def cut(self) -> None:
        """Shut down both directions; pending reads and waits return. Raises OSError if it is already closed."""
        self._wake.set()
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def reset_on_close(self) -> None:
        """Make `close` reset the connection, as if the server had crashed."""
        self._resets = True

    def close(self) -> None:
        """Close after reading what the client still sends. Unread bytes would reset the connection, and the client
        would lose the last reply."""
        if self._resets:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            until = time.monotonic() + _DRAIN_SECONDS
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_WR)
                self._socket.settimeout(_DRAIN_SECONDS)
                while socket.socket.recv(self._socket, 1 << 16) and time.monotonic() < until:
                    pass
        self._socket.close()
