"""The SQLite file of an index: its statements, its connections, and when to believe it.

**A bug of SQLite before 3.51.3.** It may lose a commit that one connection makes while
another begins a checkpoint (sqlite.org/wal.html, "The WAL-Reset Bug"). So both happen
under the flush lock, and every other connection only reads.

**Forks.** A child that is forked while another thread holds a lock that SQLite has in
memory would wait for ever. So each use of a connection is in one of the two blocks
``reading`` and ``writing``, and a fork waits until no thread is in such a block.
"""

import errno
import json
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from random import getrandbits
from typing import NamedTuple

from store.base import ID_MAX

ROWS = 1_024  # ids of one INSERT; json.dumps() holds the GIL, 0.2 ms for so many
CHECKPOINT_PAGES = 1_000  # in the WAL; then a commit begins a checkpoint: two syncs
# While a table is built. A larger one saves a quarter of the time of scattered ids.
BUILD_CACHE_KIB = 16 * 1024
MOST_BYTES = 16 * 1024 * 1024  # of a value, also of the ids of one statement
BUSY = 1.0  # seconds that SQLite waits for the lock of another connection
WAL_HEADER, FRAME_HEADER = 32, 24  # bytes (sqlite.org/fileformat2.html)
NUMBER_AT, PAGES_AT = 60, 28  # where page 1 has user_version and the number of pages

SCHEMA = (
    'CREATE TABLE plants (id INTEGER PRIMARY KEY, offset INTEGER NOT NULL);'
    'CREATE TABLE state (inode, mark, tail, mtime)'
)
STATE = 'SELECT inode, mark, tail, mtime FROM state LIMIT 2'  # there is one
LOOK = (
    'SELECT mark, value, offset, (SELECT min(id) FROM plants WHERE id > value) '
    'FROM state LEFT JOIN json_each(?) LEFT JOIN plants ON plants.id = value'
)
# NOTE: json_each inserts without the GIL; executemany() takes the GIL again
# for each row, and waits up to seconds for it.
INSERT = (
    'INSERT OR IGNORE INTO plants SELECT CAST(key AS INTEGER), value '
    'FROM json_each(?) WHERE value >= ? AND value < ? ORDER BY 1'
)
UPDATE = 'UPDATE state SET inode = ?, mark = ?, tail = ?, mtime = ?'

Offsets = dict[int, int]  # of lines of the plant file, by their ids


class State(NamedTuple):
    """The one row of the table ``state``; all but the mark tell whose index it is."""

    inode: int  # of the plant file; its device number would change with a mount
    mark: int  # the end of the lines whose ids are in the table
    tail: int  # the CRC-32 of the last bytes of the plant file before the mark
    mtime: int | None  # of the plant file, in ns, at the last close; None while in use


class Look(NamedTuple):
    """What was found for some ids, all of it from one state of the table."""

    mark: int
    offsets: Offsets  # of the ids that are in the table
    free: dict[int, int]  # from each other id up to the next in the table: start by end


class IndexDamaged(Exception):
    """The index cannot be believed and must be opened or built again."""


class NotOurs(OSError):
    """A file beside the plant file cannot have been made by a store."""


def read_state(connection: sqlite3.Connection) -> State:
    """Return the row of the table ``state``."""
    [[inode, mark, tail, mtime]] = connection.execute(STATE).fetchall()
    return State(int(inode), int(mark), int(tail), mtime)


def look(connection: sqlite3.Connection, ids: Iterable[int]) -> Look:
    """Look ids up with one statement."""
    offsets: Offsets = {}
    free: dict[int, int] = {}
    rows = connection.execute(LOOK, [str(list(ids))]).fetchall()
    for _, id, offset, next_id in rows:
        if offset is not None:
            offsets[id] = int(offset)
        elif id is not None:  # without ids there is one row
            end = ID_MAX + 1 if next_id is None else int(next_id)
            free[end] = min(id, free.get(end, id))
    return Look(int(rows[0][0]), offsets, free)


def insert(
    connection: sqlite3.Connection, entries: Offsets, start: int, end: int
) -> None:
    """Insert the entries between two offsets whose id is not there yet."""
    # SQLite leaves out the others and sorts: in Python that would hold the GIL.
    rest = iter(entries.items())
    while rows := dict(islice(rest, ROWS)):
        connection.execute(INSERT, [json.dumps(rows), start, end])


def commit(connection: sqlite3.Connection, state: State) -> None:
    """Commit the transaction, with a new state and the next number."""
    connection.execute(UPDATE, state)
    [number] = connection.execute('PRAGMA user_version').fetchone()
    connection.execute(f'PRAGMA user_version = {number + 1}')
    connection.execute('COMMIT')


# Two, since a look must not wait for a flush. A fork takes the last one first.
_reading, _writing = threading.RLock(), threading.RLock()
for _lock in _reading, _writing:
    # NOTE: never removed, so these callbacks must not keep this module in memory.
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_lock.release,
    )


@contextmanager
def _using(lock: threading.RLock, error: Callable[[str], Exception]) -> Iterator[None]:
    """Hold a lock; raise ``error`` for what cannot be read or written.

    Code that needs both locks takes ``_writing`` first, as a fork does.
    """
    try:
        with lock:
            yield
    except NotOurs:
        raise
    except OSError as ex:
        raise error(ex.strerror or str(ex)) from ex  # a client sees it: no path
    except (sqlite3.Error, TypeError, ValueError) as ex:
        raise error(str(ex)) from ex


reading = partial(_using, _reading, IndexDamaged)
writing = partial(
    _using, _writing, lambda reason: OSError(errno.EIO, f'the index: {reason}')
)

# The connections that read, each with the process that has made it, and its file.
_readers: dict[sqlite3.Connection, tuple[int, Path]] = {}
_mains: dict[Path, int] = {}  # descriptors of these files


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads. REQUIRES: ``reading``."""
    # NOTE: connections of a child lock no file while one of its parent is open in it.
    for inherited, (pid, _) in [*_readers.items()]:
        if pid != os.getpid():
            disconnect(inherited)
    for suffix in ('', '-wal', '-shm', '-journal'):
        check_made_by_us(f'{path}{suffix}')
    connection = _connect(f'{path.as_uri()}?mode=ro')
    try:
        _check_schema(connection)
    except BaseException:
        connection.close()
        raise
    _readers[connection] = os.getpid(), path
    return connection


def disconnect(connection: sqlite3.Connection) -> None:
    """Close a connection that reads. REQUIRES: ``reading``."""
    connection.close()
    if connection in _readers:
        _, path = _readers.pop(connection)
        if path in _mains and path not in [other for _, other in _readers.values()]:
            os.close(_mains.pop(path))


def _check_schema(connection: sqlite3.Connection) -> None:
    """Raise ``IndexDamaged`` unless the tables are ours: a view could run for ever."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    steps = iter(range(100))
    connection.set_progress_handler(lambda: next(steps, None) is None, 1_000)
    found = connection.execute('SELECT sql FROM sqlite_master LIMIT 3').fetchall()
    connection.set_progress_handler(None, 0)
    if ';'.join(str(sql) for (sql,) in found) != SCHEMA:
        raise IndexDamaged('it has other tables')


def check_made_by_us(path: str | Path) -> None:
    """Raise ``NotOurs`` for a link, a second name of a file, or no regular file.

    Another user who may write to the directory may have put it there.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            name = re.sub(r'.*(?=\.index)', '', str(path))  # a client may see it
            reason = 'beside the plant file is not a regular file with one link'
            raise NotOurs(errno.EPERM, f'{name} {reason}: remove it')


@contextmanager
def connect_for_writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that commits. REQUIRES: the flush lock."""
    uri = path.as_uri()
    with ExitStack() as after, closing(_connect(f'{uri}?mode=rw')) as connection:
        connection.executescript(
            'PRAGMA synchronous = NORMAL; PRAGMA fullfsync = ON;'  # as disk.sync()
            'PRAGMA journal_mode = WAL; PRAGMA journal_size_limit = 0;'
            f'PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}'
        )
        try:
            yield connection
        finally:
            # NOTE: the connection that is closed last removes the WAL, if it has read
            # it and may write. So a connection that only reads is closed after this.
            last = after.enter_context(closing(_connect(f'{uri}?mode=ro')))
            last.execute(STATE)


def leave_wal(connection: sqlite3.Connection) -> bool:
    """Leave the WAL mode if no other connection is open; return whether it worked."""
    connection.execute('PRAGMA busy_timeout = 0')
    connection.execute('PRAGMA synchronous = FULL')
    with suppress(sqlite3.OperationalError):
        [mode] = connection.execute('PRAGMA journal_mode = DELETE').fetchone()
        return bool(mode == 'delete')
    return False


def new_table(path: Path | None = None) -> sqlite3.Connection:
    """Return a connection to a new table, in a transaction.

    It is in an empty file or, without a path, in a file that SQLite removes. It needs
    no journal: an unfinished table is removed.
    """
    connection = _connect(path.as_uri() if path else '')
    connection.executescript(
        'PRAGMA journal_mode = OFF; PRAGMA synchronous = NORMAL; PRAGMA fullfsync = ON;'
        f'PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -{BUILD_CACHE_KIB};'
        f'BEGIN; {SCHEMA}; INSERT INTO state VALUES (0, 0, 0, NULL);'
        # Random: the WAL of an earlier table may be put back, and must not fit.
        f'PRAGMA user_version = {getrandbits(30)}'
    )
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=BUSY, check_same_thread=False)


def belongs_together(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether main file and WAL belong together. REQUIRES: ``reading``.

    SQLite lays the pages of the WAL, of all commits since a checkpoint has ended, over
    the main file. If an older copy of one of the two was put back, ids are missing, and
    SQLite does not notice. So each commit increases a number in page 1.

    A copy of the main file that outlasted a checkpoint has a wrong length, but only if
    this checkpoint added pages.
    """
    # Read one after another, and another process may flush meanwhile: so read again.
    for _ in range(10):
        page_1 = _read_page_1(path)
        number, pages = _integer(page_1, NUMBER_AT), _integer(page_1, PAGES_AT)
        [page_size] = connection.execute('PRAGMA page_size').fetchone()
        [last_number] = connection.execute('PRAGMA user_version').fetchone()
        [last_pages] = connection.execute('PRAGMA page_count').fetchone()
        length = os.stat(path).st_size // page_size
        has_wal, first_number = _read_wal(path)
        if not has_wal:
            # It must have been closed: a main file that was in use may be a copy from
            # the middle of a checkpoint.
            fits = read_state(connection).mtime is not None
        elif first_number is None or number == first_number - 1:
            # A checkpoint has ended. Until a commit begins the WAL again, the main file
            # alone counts; then it is as of the commit before the first in the WAL.
            fits = pages <= length <= last_pages
        else:
            # A checkpoint of this WAL was cut off. It has written page 1 first, and
            # each page that it writes is in the WAL, too.
            fits = first_number <= number <= last_number and length <= last_pages
        if fits:
            return True
    return False


def _read_page_1(path: Path) -> bytes:
    # NOTE: closing a file releases all locks that this process has on it, those of
    # SQLite, too. So it stays open while connections are, and the path names it.
    fd = _mains.get(path)
    if fd is None or not os.path.samestat(os.fstat(fd), os.stat(path)):
        if fd is not None:
            os.close(_mains.pop(path))
        fd = _mains[path] = os.open(path, os.O_RDONLY)
    return os.pread(fd, 100, 0)


def _read_wal(path: Path) -> tuple[bool, int | None]:
    """Return whether there is a WAL, and the number of its first commit, if any."""
    with suppress(FileNotFoundError), open(f'{path}-wal', 'rb') as wal:
        header = wal.read(WAL_HEADER)
        page_size = _integer(header, 8)
        # Frames with another salt are from before the WAL was begun again. The pages of
        # a commit are in order, unless the commit is larger than the cache.
        while (frame := wal.read(FRAME_HEADER)) and frame[8:16] == header[16:24]:
            if _integer(frame, 0) == 1:
                return True, _integer(wal.read(page_size), NUMBER_AT)
            wal.seek(page_size, os.SEEK_CUR)
        return len(header) == WAL_HEADER, None
    return False, None


def _integer(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], 'big')
