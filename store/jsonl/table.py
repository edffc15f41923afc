"""The SQLite file of an index: its statements, its locks and its connections.

**Commit and checkpoint both happen under the flush lock, and every other connection
only reads.** SQLite before 3.51.3 may lose a commit that one connection makes while
another begins a checkpoint (sqlite.org/wal.html, "The WAL-Reset Bug"), and most systems
have such a version.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

# Ids of one INSERT. json.dumps() holds the GIL, 0.2 ms for so many.
ROWS = 1_024
# A checkpoint syncs two files. A commit begins it when the WAL has so many pages.
CHECKPOINT_PAGES = 1_000
# Cache of SQLite while a table is built: scattered ids change nearly every page again
# and again. With a small cache each page would be written a hundred times.
BUILD_CACHE_KIB = 256 * 1024
BUSY = 1.0  # seconds that SQLite waits for the lock of another connection

SCHEMA = (
    'CREATE TABLE plants (id INTEGER PRIMARY KEY, offset INTEGER NOT NULL);'
    'CREATE TABLE state (inode, mark, tail, mtime)'
)
STATE = 'SELECT inode, mark, tail, mtime FROM state'
# One statement, so that the mark is that of the ids. NULL is its key.
FIND = (
    'SELECT NULL, mark FROM state UNION ALL '
    'SELECT id, offset FROM plants WHERE id IN (SELECT value FROM json_each(?))'
)
# NOTE: json_each leaves the GIL alone while it inserts; executemany() takes it again
# for each row, and waits up to seconds for it.
INSERT = (
    'INSERT OR IGNORE INTO plants SELECT CAST(key AS INTEGER), value '
    'FROM json_each(?) WHERE value >= ? AND value < ? ORDER BY 1'
)
UPDATE = 'UPDATE state SET inode = ?, mark = ?, tail = ?, mtime = ?'


class State(NamedTuple):
    """The one row of the table ``state``."""

    inode: int  # that of the plant file
    mark: int  # the end of the lines whose ids are in the table
    tail: int  # the CRC-32 of the bytes of the plant file before the mark
    # That of the plant file, in nanoseconds, since the last process has closed the
    # index; None while one has it in use.
    mtime: int | None


class IndexDamaged(Exception):
    """The index cannot be believed and must be built again."""


# Held while connections are used: two, so that lookups do not wait for a flush. A fork
# waits for both. SQLite has locks for all its connections: a child that is forked while
# another thread holds one would wait for it forever, with the lock of the plant file.
_reading, _writing = threading.RLock(), threading.RLock()
for _lock in _reading, _writing:
    # NOTE: these are never removed, so they must not keep this module in memory.
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_lock.release,
    )


@contextmanager
def reading() -> Iterator[None]:
    """Use connections that read; raise ``IndexDamaged`` for what cannot be read."""
    try:
        with _reading:
            yield
    except OSError as ex:
        raise IndexDamaged(str(ex.strerror)) from ex  # a client sees it: no path
    except (sqlite3.Error, TypeError, ValueError) as ex:
        raise IndexDamaged(str(ex)) from ex


@contextmanager
def writing() -> Iterator[None]:
    """Use connections that write; raise ``OSError`` for what cannot be written."""
    try:
        with _writing:
            yield
    except FileNotFoundError as ex:  # not the plant file
        raise OSError(errno.ESTALE, 'a file of the index was removed') from ex
    except (sqlite3.Error, TypeError) as ex:
        raise OSError(errno.EIO, f'the index cannot be written: {ex}') from ex


# The connections that read, each with the process that has made it.
_readers: dict[sqlite3.Connection, int] = {}


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads. REQUIRES: ``reading``."""
    # Connections of one process share their locks. If one that a forked child has
    # inherited stayed open, those of the child would take none.
    for inherited, pid in [*_readers.items()]:
        if pid != os.getpid():
            disconnect(inherited)
    connection = _connect(f'{path.as_uri()}?mode=ro')
    _readers[connection] = os.getpid()
    return connection


def disconnect(connection: sqlite3.Connection) -> None:
    """Close a connection that reads. REQUIRES: ``reading``."""
    _readers.pop(connection, None)
    connection.close()


@contextmanager
def connect_for_writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that commits. REQUIRES: the flush lock."""
    with closing(_connect(f'{path.as_uri()}?mode=rw')) as connection:
        connection.execute('PRAGMA synchronous = NORMAL')
        connection.execute('PRAGMA journal_mode = WAL')
        connection.execute('PRAGMA journal_size_limit = 0')  # after a checkpoint
        connection.execute(f'PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}')
        yield connection


def new_table(path: Path | None = None) -> sqlite3.Connection:
    """Return a connection to a new table, in a transaction.

    An unfinished table is removed, never rolled back. So it needs no journal, and only
    the commit syncs.

    Args:
        path: An empty file, or ``None`` for a table that SQLite removes.
    """
    connection = _connect(path.as_uri() if path else '')
    connection.executescript(
        'PRAGMA journal_mode = OFF; PRAGMA synchronous = NORMAL;'
        f'PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -{BUILD_CACHE_KIB};'
        f'BEGIN; {SCHEMA}; INSERT INTO state VALUES (0, 0, 0, NULL)'
    )
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False
    )


def read_state(connection: sqlite3.Connection) -> State:
    """Return the row of the table ``state``."""
    inode, mark, tail, mtime = connection.execute(STATE).fetchone()
    return State(int(inode), int(mark), int(tail), mtime)


def find(
    connection: sqlite3.Connection, ids: Iterable[int]
) -> tuple[int, dict[int, int]]:
    """Return the mark, and the offsets of those ids that are in the table."""
    found = dict(connection.execute(FIND, [str(list(ids))]).fetchall())
    return int(found.pop(None)), found


def insert(
    connection: sqlite3.Connection, entries: dict[int, int], start: int, end: int
) -> None:
    """Insert the entries between two offsets whose id is not there yet.

    SQLite leaves out the others and sorts: in Python that would hold the GIL.
    """
    rest = iter(entries.items())
    while rows := dict(islice(rest, ROWS)):
        connection.execute(INSERT, [json.dumps(rows), start, end])


def commit(connection: sqlite3.Connection, state: State) -> None:
    """Commit the transaction, with a new state."""
    connection.execute(UPDATE, state)
    connection.execute('COMMIT')


def leave_wal(connection: sqlite3.Connection) -> bool:
    """Leave the WAL mode; return whether no other connection is open, as it needs."""
    connection.execute('PRAGMA busy_timeout = 0')
    connection.execute('PRAGMA synchronous = FULL')
    try:
        mode = connection.execute('PRAGMA journal_mode = DELETE').fetchone()
    except sqlite3.OperationalError:
        return False
    return bool(mode == ('delete',))
