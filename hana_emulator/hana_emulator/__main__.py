"""`python -m hana_emulator`: run the HANA emulator in the foreground until SIGTERM, SIGINT or the end of its parent."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hana_emulator.faults import Fault, FaultList, FaultRefused
from hana_emulator.server import BindRefused, Server, check_loopback

if TYPE_CHECKING:
    from hana_emulator.nlp import Nlp
    from hana_emulator.tls import Tls

_PARENT_CHECK_SECONDS = 0.5
_LARGEST_PORT = 65535
# In the data folder while it is served: a copy of the first line, for programs that know only the folder
_GREETING = "connection.json"


def _fault(document: str) -> Fault:
    try:
        return Fault.parse(document)
    except FaultRefused as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _FolderRefused(Exception):
    """A running emulator already uses the data folder."""


class _FunctionRefused(Exception):
    """The function of --embedder or --reranker cannot be imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the emulator. Returns 0 after a signal, 2 if the address or the data folder cannot be used."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="hana_emulator: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m hana_emulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 (default) picks a free port")
    parser.add_argument("--data", type=Path, help="folder to keep, created if missing; default: a temporary one")
    parser.add_argument("--user", default="OWL")
    parser.add_argument("--password", default="Owl-Stand-in-1", help="not secret: test data on loopback")
    parser.add_argument("--schema", default="SAPDEMO", help="the user's schema (default %(default)s)")
    parser.add_argument("--sample", action="store_true", help="fill the schema with SAP-like sample tables")
    parser.add_argument("--tls", action="store_true", help="use TLS, with a certificate of its own authority")
    parser.add_argument("--tls-host", metavar="NAME", help="TLS, certificate for NAME only: clients must reject it")
    parser.add_argument("--tls-expired", action="store_true", help="TLS with an expired certificate")
    parser.add_argument(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="JSON",
        help='inject a fault: {"match": "INSERT", "action": "drop_after"}; repeatable (docs/emulator.md)',
    )
    parser.add_argument(
        "--max-login-failures",
        type=int,
        default=6,
        metavar="N",
        help="lock a user after N wrong passwords in a row (default %(default)s; 0: never)",
    )
    parser.add_argument(
        "--embedder", metavar="PACKAGE.MODULE:FUNCTION", help="computes VECTOR_EMBEDDING; default: hashes words"
    )
    parser.add_argument(
        "--reranker", metavar="PACKAGE.MODULE:FUNCTION", help="computes CROSS_ENCODE; default: compares words"
    )
    parser.add_argument(
        "--without-nlp",
        type=int,
        nargs="?",
        const=258,
        choices=(258, 328),
        metavar="CODE",
        help="refuse VECTOR_EMBEDDING and CROSS_ENCODE with error 258 (default) or 328",
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this process ends")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= _LARGEST_PORT:
        parser.error(f"--port must be from 0 to {_LARGEST_PORT}, not {options.port}; 0 picks a free port")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        check_loopback(options.host)
        with _data_folder(options.data) as folder:
            _run(options, folder)
    except (BindRefused, _FolderRefused, _FunctionRefused, OSError) as error:
        sys.stderr.write(f"hana_emulator: {_refusal(error, options)}\n")
        return 2
    return 0


def _refusal(error: Exception, options: argparse.Namespace) -> str:
    """Return the error as a message that says what to do."""
    if not isinstance(error, OSError):
        return str(error)
    if error.errno in (errno.EADDRINUSE, errno.EACCES) and error.filename is None:
        why = "is in use" if error.errno == errno.EADDRINUSE else "cannot be bound by this user"
        return f"{options.host}:{options.port} {why}; choose another with --port; 0 picks a free one"
    if error.filename is not None and options.data is not None:
        return f"--data {options.data}: {error.filename}: {error.strerror}; choose a writable folder"
    return str(error)


@contextlib.contextmanager
def _data_folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
    else:
        with tempfile.TemporaryDirectory(prefix="hana-emulator-") as temporary:
            yield Path(temporary)


def _run(options: argparse.Namespace, folder: Path) -> None:
    from hana_emulator.sql.database import Database

    try:
        database = Database(folder, options.user, options.password, options.schema, nlp=_nlp(options))
    except RuntimeError as error:
        raise _FolderRefused(error) from None
    try:
        if options.sample:
            from hana_emulator.sample import load

            load(database, options.user, options.schema)
        faults = FaultList(options.fault)
        database.monitors["faults"] = faults.as_json
        database.logins.maximum = options.max_login_failures
        tls = _tls(options, folder)
        server = Server(database, options.host, options.port, tls=None if tls is None else tls.context, faults=faults)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        if options.parent_pid is not None:
            _follow(options.parent_pid, server)
        host, port = server.address
        login = {"user": options.user, "password": options.password, "schema": options.schema}
        greeting = {"host": host, "port": port, **login}
        greeting |= {} if tls is None else {"trust_store": str(tls.trust_store)}
        with _announced(json.dumps(greeting), folder / _GREETING):
            server.serve()
    finally:
        database.close()


def _nlp(options: argparse.Namespace) -> Nlp:
    from hana_emulator import nlp  # slow to import

    def chosen(option: str, name: str | None) -> Callable[..., Any] | None:
        try:
            return None if name is None else nlp.function_named(name)
        except ValueError as error:
            raise _FunctionRefused(f"{option}: {error}") from None

    embedder, reranker = chosen("--embedder", options.embedder), chosen("--reranker", options.reranker)
    return nlp.Nlp(embedder, reranker, options.without_nlp)


def _tls(options: argparse.Namespace, folder: Path) -> Tls | None:
    if not (options.tls or options.tls_host or options.tls_expired):
        return None
    from hana_emulator import tls  # slow to import

    return tls.prepare(folder, options.tls_host, expired=options.tls_expired)


@contextlib.contextmanager
def _announced(greeting: str, file: Path) -> Iterator[None]:
    """Once connections are accepted, write the greeting to `file` and stdout for waiting scripts. Remove `file` at
    the end."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(greeting)
    try:
        sys.stdout.write(greeting + "\n")
        sys.stdout.flush()
        yield
    finally:
        file.unlink(missing_ok=True)


def _follow(pid: int, server: Server) -> None:
    """Stop the server when process `pid` is gone, so that a killed parent leaves no orphan."""
    is_parent = os.getppid() == pid
    pause = threading.Event()

    def alive() -> bool:
        if is_parent:  # a dead parent may remain a zombie
            return os.getppid() == pid
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def watch() -> None:
        while alive():
            pause.wait(_PARENT_CHECK_SECONDS)
        server.stop()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
