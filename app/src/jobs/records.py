"""Where the records of jobs are kept, and in a file which processes still run."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from app.src.jobs.journal import OWNED, StateUnusable
from connector.errors import ConnectorError, StoreCorrupt
from connector.stores.local.sqlite_file import Schema, SqliteDatabase, SqliteFile

if TYPE_CHECKING:
    from connector.stores.state import Query, Session

T = TypeVar("T")
_FILE = "jobs.sqlite"
SCHEMA = Schema(
    application_id=0x4F574C4A,  # spells OWLJ
    version=3,
    script=files(__package__).joinpath("layout.sql").read_text(encoding="utf-8"),
    called="the file of job records",
    remedy="start again: it holds the history of jobs, no rows and no vectors",
)


class Records(Protocol):
    """The tables of the job records in one database, with their names as SQL. Thread-safe."""

    @property
    def jobs(self) -> str: ...

    @property
    def events(self) -> str: ...

    @property
    def turns(self) -> str: ...

    @property
    def claimed(self) -> str:
        """Return what an UPDATE also sets for a job that this process takes, after a comma; or ""."""

    @property
    def owner(self) -> str:
        """Return the name of this process in the records."""

    def open(self) -> None:
        """Prepare for writing. Raises StateUnusable, also after `close`."""

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return the rows, and [] before the first write, which creates the tables."""

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work`, which must be idempotent, as the only write transaction of all threads and processes."""

    def left(self, query: Query) -> list[tuple[str, bool]]:
        """Return id and `cancelling` of unfinished jobs whose process has ended."""

    def keep(self, job: str) -> None:
        """Show from now on that this process runs the job."""

    def drop(self, job: str) -> None:
        """End `keep`."""

    def close(self) -> None: ...


class FileRecords:
    """Records in `folder/jobs.sqlite`, for the processes of one machine. The first write creates the folder with mode
    0700. Raises StateUnusable, and the errors of `SqliteFile`.

    Each process locks a file that the others see (wherever SQLite's own locks work), and the kernel releases the lock
    when the process ends. No clock is involved, so a slow or stopped process does not count as dead.
    """

    jobs, events, turns, claimed = "jobs", "events", "turns", ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner = ""  # until `open`
        self._lock = threading.RLock()
        self._file: SqliteFile | None = None
        self._alive = -1
        self._closed = False

    def open(self) -> None:
        self._opened()

    def _opened(self) -> SqliteDatabase:
        with self._lock:
            if self._closed:
                raise StateUnusable("the service is ending and starts no more jobs")
            if self._file is None:
                try:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    file = SqliteFile(self.folder / _FILE, SCHEMA)
                    self.owner = f"{os.getpid()}-{secrets.token_hex(6)}"
                    self._lock_file = self.folder / f"{self.owner}.alive"
                    self._alive = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                    fcntl.flock(self._alive, fcntl.LOCK_EX)
                except (OSError, ConnectorError) as error:
                    raise self._unusable(error) from None
                self._file = file
            return SqliteDatabase(self._file)

    def _unusable(self, error: OSError | ConnectorError) -> StateUnusable:
        if isinstance(error, StoreCorrupt):  # damaged, or of another version: another folder is not the remedy
            return StateUnusable(str(error))
        why = error.strerror if isinstance(error, OSError) else str(error)
        return StateUnusable(
            f"the folder for job records, {self.folder}, cannot be used ({why}): set [state] path "
            "(OWL_SAP_STATE__PATH) to a folder that this user may write"
        )

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            if self._file is None:
                (self.folder / _FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:  # owned by another user
            raise self._unusable(error) from None
        return self._opened().read(sql, parameters)

    def write(self, work: Callable[[Session], T]) -> T:
        return self._opened().in_transaction(work)

    def left(self, query: Query) -> list[tuple[str, bool]]:
        owned = query(f'SELECT "ID", "CANCELLING", "OWNER" FROM jobs WHERE {OWNED}', ())  # noqa: S608 - constant
        gone = {owner for owner in {owner for *_, owner in owned} if not is_alive(self.folder, owner)}
        return [(id_, bool(cancelling)) for id_, cancelling, owner in owned if owner in gone]

    def keep(self, job: str) -> None:
        """Do nothing: the lock shows that the process runs."""

    def drop(self, job: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            file, self._file = self._file, None
        if file is not None:
            file.close()
            with suppress(OSError):
                self._lock_file.unlink()
            os.close(self._alive)


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether the process with this `FileRecords.owner` still runs. Removes the file of a dead process."""
    path = folder / f"{owner}.alive"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # a process of another user
    try:
        # Shared, so that two concurrent callers do not mistake each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    with suppress(OSError):
        path.unlink()
    return False
