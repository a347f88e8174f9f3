"""A proxy between a driver and the emulator, as a process of its own: keeps what the driver sends, per connection.

`python tests/fuzz/recorder.py PORT FOLDER` prints the port it listens on; FOLDER/<n>.bin is connection n.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path
from typing import BinaryIO


def copy(source: socket.socket, target: socket.socket, kept: BinaryIO | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if kept is not None:
                kept.write(data)
                kept.flush()
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main(port: int, folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    number = 0
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kept = (folder / f"{number}.bin").open("wb")
        number += 1
        threading.Thread(target=copy, args=(client, server, kept), daemon=True).start()
        threading.Thread(target=copy, args=(server, client), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
