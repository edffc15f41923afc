"""The index of a plant file: from an id to the offset of its line.

It is on disk and shared by all processes, so that a start costs the same with ten
plants and ten million. Only the plant file is truth. The index has two parts:

* The *table*, ``plants.jsonl.index``, is an SQLite file. It has the ids of the lines
  before the *mark*, an end of the plant file that was synced. Ids and mark change in
  one transaction. So after a crash the table may be behind the plant file, never ahead
  of it, and the lines from the mark on are read again.
* The *recent ids*, of the lines from the mark on, are a dictionary in each process,
  which reads them from the end of the plant file. So an add writes nothing to SQLite.

A *flush* enters recent ids that are synced into the table: a second after an add, or
sooner when there are many. Readers need not wait for it. One process at a time
flushes, with a lock of its own. **Commit and checkpoint both happen under that lock,
and every other connection only reads.** SQLite before 3.51.3 may lose a commit that one
connection makes while another begins a checkpoint (sqlite.org/wal.html, "The WAL-Reset
Bug"), and most systems have such a version.

**A wrong answer would give an id twice.** A hit is verified: the caller reads the line.
A miss is believed if SQLite has read it from files that still have their names, and if
they belong to this plant file as it is:

* the inode is that of the plant file (not the device: its number changes with a mount);
* the last 256 bytes before the mark are the same;
* the last process that closes the index leaves the mark at the end, and the mtime. If
  the plant file has another size or mtime at the next open, it was edited.

An index that is missing, damaged or not of this plant file is built again. One that
somebody changes in place while it is in use may end a process (SIGBUS).

Every method REQUIRES the lock of the plant file, unless it says otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from store.jsonl.disk import index_path, new_file, remove_index, sync_directory
from store.jsonl.lock import take_flock, try_flock
from store.jsonl.synced import UNKNOWN

# Recent ids, or bytes of the plant file behind the mark, after which a flush begins.
FLUSH_AT = 16_384
FLUSH_BYTES = 32 * 1024 * 1024
# A process that adds many plants flushes before it goes on when it has more recent ids.
MOST_RECENT = 100_000
CHUNK = 250_000  # ids in memory while a table is built
# Ids of one INSERT. json.dumps() holds the GIL, 0.3 ms for so many.
ROWS = 4_096
# A checkpoint syncs two files. It begins when the WAL has so many bytes.
CHECKPOINT_BYTES = 4 * 1024 * 1024
# Cache of SQLite while a table is built: scattered ids change nearly every page again
# and again. With a small cache each page would be written a hundred times.
BUILD_CACHE_KIB = 256 * 1024
BUSY = 1.0  # seconds that SQLite waits for the lock of another connection
TAIL = 256  # bytes before the mark that are compared

_SCHEMA = (
    'CREATE TABLE plants (id INTEGER PRIMARY KEY, offset INTEGER NOT NULL);'
    # mtime, in nanoseconds, is NULL while a process has the index in use.
    'CREATE TABLE state (inode, mark, tail, mtime);'
)
# One statement, so that the mark is that of the ids. NULL is its key.
_FIND = (
    'SELECT NULL, mark FROM state UNION ALL '
    'SELECT id, offset FROM plants WHERE id IN (SELECT value FROM json_each(?))'
)
# NOTE: json_each leaves the GIL alone while it inserts; executemany() takes it again
# for each row, and waits up to seconds for it.
_INSERT = (
    'INSERT OR IGNORE INTO plants '
    'SELECT CAST(key AS INTEGER), value FROM json_each(?) ORDER BY 1'
)
_COUNT_WRONG = (
    'SELECT count(*) FROM ('
    'SELECT * FROM (SELECT * FROM main.plants WHERE offset < ?) EXCEPT '
    'SELECT * FROM (SELECT * FROM disk.plants WHERE offset < ?))'
)
_UPDATE = 'UPDATE state SET inode = ?, mark = ?, tail = ?, mtime = ?'


def _lock_of_sqlite() -> Any:  # an RLock, which is no type
    """Return a lock that is free while a process is forked, also in the child.

    SQLite has locks for all its connections. A child that is forked while another
    thread holds one would wait for it forever, with the lock of the plant file.
    """
    lock = threading.RLock()
    # NOTE: these are never removed, so they must not keep this module in memory.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


# Two, so that lookups do not wait for a flush. A fork waits for both.
_reading, _writing = _lock_of_sqlite(), _lock_of_sqlite()

# Connections in a transaction that a forked child has inherited from its parent.
_inherited: list[sqlite3.Connection | None] = []

# Called with the first offset of an id, and another offset of the same id.
Repeat = Callable[[int, int], None]


class IndexDamaged(Exception):
    """The index cannot be believed and must be built again."""


@contextmanager
def _read_errors() -> Iterator[None]:
    """Raise ``IndexDamaged`` for a table that cannot be read."""
    try:
        with _reading:
            yield
    except (sqlite3.Error, OSError, TypeError, ValueError) as ex:
        raise IndexDamaged(str(ex)) from ex


@contextmanager
def _write_errors() -> Iterator[None]:
    """Raise ``OSError`` for a table that cannot be written."""
    try:
        with _writing:
            yield
    except (sqlite3.Error, TypeError) as ex:
        raise OSError(errno.EIO, f'the index cannot be written: {ex}') from ex


class Index:
    """The index of a plant file, as one process has it open.

    Args:
        path: The path of the plant file.
        plants: A descriptor of the plant file.
        new: Do not read the table.

    Attributes:
        mark: The mark, when the table was last read.
        end: The end of the plant file up to which the ids are known.
        synced: An end of the plant file that is known to be synced, or ``UNKNOWN``.
        reason: Why the table is not believed, or ``None``.
    """

    def __init__(self, path: Path, plants: int, *, new: bool = False) -> None:
        self._plants_path = path
        self._path = index_path(path)
        self._plants = plants
        self._inode = os.fstat(plants).st_ino
        self._readable: sqlite3.Connection | None = None
        self._files: list[int | None] = []  # the inodes of the table, -wal and -shm
        self._written: sqlite3.Connection | None = None  # in a transaction
        self._flush_lock = -1  # a descriptor, while there is a transaction
        self._new = index_path(path, '-new')
        self._recent: dict[int, int] = {}
        self._tail = 0
        self.mark = self.end = 0
        self.synced = UNKNOWN
        self.reason: str | None = None
        if new:
            self.reason = 'a new one is wanted'
            return
        try:
            self._load()
        except IndexDamaged as ex:
            self.reason = str(ex)
            self.close()

    def _load(self) -> None:
        if not self._path.exists():
            raise IndexDamaged('there is none')
        with _read_errors():
            self._readable = _connect(self._path, 'ro')
            query = 'SELECT inode, mark, tail, mtime FROM state'
            inode, mark, tail, mtime = self._readable.execute(query).fetchone()
            self._files = self._inodes()
            mark = int(mark)
            if inode != self._inode:
                raise IndexDamaged('it is of another file')
            self.synced = mark
        status = os.fstat(self._plants)
        if mark > status.st_size:
            raise IndexDamaged('the plant file is shorter')
        was_closed = mtime is not None
        if was_closed and (mark, mtime) != (status.st_size, status.st_mtime_ns):
            raise IndexDamaged('the plant file was changed while nobody had it open')
        if tail != tail_of(self._plants, mark):
            raise IndexDamaged('the plant file was changed in place')
        self.mark = mark
        self.know(mark)

    # ---- finding ids

    def find_old(self, ids: Iterable[int]) -> dict[int, int]:
        """Return the offsets of those ids that are in the table; notice a new mark."""
        if self._readable is None:
            raise IndexDamaged('it is not open')
        with _read_errors():
            mark, found = _find(self._readable, ids)
            self._check_files()
        if mark < self.mark:
            raise IndexDamaged('it is an older one')
        if mark > self.mark:
            self.mark = mark
            self._recent = {id: at for id, at in self._recent.items() if at >= mark}
            if mark > self.end:  # other processes have appended and flushed
                self.know(mark)
        return found

    def recent(self, ids: Iterable[int]) -> dict[int, int]:
        """Return the offsets of those ids that are recent."""
        return {id: self._recent[id] for id in ids if id in self._recent}

    def _inodes(self) -> list[int | None]:
        inodes: list[int | None] = []
        for suffix in '', '-wal', '-shm':
            try:
                inodes.append(os.stat(f'{self._path}{suffix}').st_ino)
            except FileNotFoundError:
                inodes.append(None)
        return inodes

    def _check_files(self) -> None:
        """Check, after a read, that the files read from still have their names.

        A process that opens the index later makes the missing ones anew, and flushes
        into them: from then on this connection would read old pages.
        """
        files = self._inodes()
        if files != self._files:
            # The first flush makes -wal and -shm.
            known = zip(files, self._files, strict=True)
            if any(old not in (None, new) for new, old in known):
                raise IndexDamaged('a file of it was removed or replaced')
            self._files = files

    def is_at_end(self) -> bool:
        """Whether the bytes before ``end`` are those that were there."""
        return self._tail == tail_of(self._plants, self.end)

    # ---- learning ids

    def enter(self, offsets: dict[int, int], end: int) -> None:
        """Enter the ids of an append, which ends at an offset."""
        self._recent.update(offsets)
        self.know(end)

    def know(self, end: int) -> None:
        """Note that all ids up to an end are known."""
        self.end = end
        self._tail = tail_of(self._plants, end)

    def learn(
        self,
        records: Iterable[tuple[int, int]],
        repeat: Repeat,
        *,
        temporary: bool = False,
    ) -> None:
        """Enter the ids of the lines from ``end`` on; ``settle`` must follow.

        Few become recent ids. Many, or all if the table is not believed, are written
        to the table, in a transaction.

        Args:
            records: Ids and offsets, in the order of the file.
            repeat: See ``Repeat``.
            temporary: Write no table that lasts; ``close`` must follow.
        """
        records = iter(records)
        few = list(islice(records, MOST_RECENT))
        if self.reason is None and len(few) < MOST_RECENT:
            self._learn_recent(few, repeat)
            return
        with _write_errors():
            self._written = self._begin(temporary)
        records = chain(few, records)
        while chunk := list(islice(records, CHUNK)):
            entries: dict[int, int] = {}
            for id, offset in chunk:
                if entries.setdefault(id, offset) != offset:
                    repeat(entries[id], offset)
            earlier: dict[int, int] = {}
            with _write_errors():
                changes = self._written.total_changes
                _insert(self._written, entries)
                if self._written.total_changes - changes < len(entries):
                    earlier = _find(self._written, entries)[1]
            _report(earlier, entries, repeat)

    def _learn_recent(self, records: list[tuple[int, int]], repeat: Repeat) -> None:
        new: dict[int, int] = {}
        for id, offset in records:
            first = self._recent.get(id)
            if first is None:
                first = new.setdefault(id, offset)
            if first != offset:
                repeat(first, offset)
        if new:
            assert self._readable is not None
            with _read_errors():
                _, earlier = _find(self._readable, new)
            _report(earlier, new, repeat)
        self._recent.update(new)

    def _begin(self, temporary: bool) -> sqlite3.Connection:
        """Begin a transaction, in a new table if the present one is not believed."""
        if temporary:
            return new_table('', self._inode)
        self._flush_lock = self._open_flush_lock()
        take_flock(self._plants_path, self._flush_lock)
        if self.reason is None:
            connection = _connect_for_writing(self._path)
            connection.execute('BEGIN IMMEDIATE')
            return connection
        self._new.unlink(missing_ok=True)
        os.close(new_file(self._new, os.fstat(self._plants)))
        return new_table(self._new.as_uri(), self._inode)

    def is_writing(self) -> bool:
        """Whether ``learn`` writes a table, which must be settled."""
        return self._written is not None

    def settle(self, end: int) -> None:
        """Finish ``learn``: all ids before an end, which is synced, are known."""
        if self._written is not None:
            with _write_errors():
                _commit(self._written, self._state(end))
                self._written.close()
                self._written = None
                if self.reason is not None:
                    self._install()
            self._unlock()
            if self.reason is not None:
                self._load()
                self.reason = None
        self.know(end)
        self.synced = end

    def _install(self) -> None:
        """Put a new table in place of the old one. REQUIRES: the flush lock."""
        fd = os.open(self._new, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        remove_index(self._plants_path)
        os.rename(self._new, self._path)
        sync_directory(self._path)

    def count_wrong(self, end: int) -> int:
        """Return how many entries before an end the table on disk has otherwise.

        It is compared with the temporary table that ``learn`` has just written.
        """
        assert self._written is not None
        with suppress(IndexDamaged), _read_errors():
            execute = self._written.execute
            execute('COMMIT')
            execute('ATTACH ? AS disk', [f'{self._path.as_uri()}?mode=ro'])
            inode, mark = execute('SELECT inode, mark FROM disk.state').fetchone()
            if inode == self._inode:
                return int(execute(_COUNT_WRONG, [min(mark, end)] * 2).fetchone()[0])
        return 0

    # ---- flushing

    def is_full(self) -> bool:
        """Whether a flush should begin at once."""
        return len(self._recent) >= FLUSH_AT or self.end - self.mark >= FLUSH_BYTES

    def is_overfull(self) -> bool:
        """Whether a process that adds many plants should wait for a flush."""
        return len(self._recent) >= MOST_RECENT

    def flush(self) -> bool:
        """Enter the recent ids that are synced into the table; it needs no lock.

        Returns:
            Whether the mark is at ``synced``; false if another process flushes.
        """
        with _write_errors(), self._flushing() as is_alone:
            if not is_alone:
                return False
            with closing(_connect_for_writing(self._path)) as connection:
                self._flush_into(connection)
                # Not at each commit, and never in a commit: it would be the add of a
                # client that waits for the syncs of a checkpoint.
                if os.stat(f'{self._path}-wal').st_size >= CHECKPOINT_BYTES:
                    connection.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchall()
        return True

    def _flush_into(
        self, connection: sqlite3.Connection, mtime: int | None = None
    ) -> None:
        query = 'SELECT inode, mark, mtime FROM state'
        inode, mark, before = connection.execute(query).fetchone()
        if inode != self._inode or mark < self.mark:
            raise OSError(errno.ESTALE, 'it is of another file')
        # NOTE: synced first: ids that are entered meanwhile are behind it.
        end = max(mark, self.synced)
        if (mark, before) == (end, mtime):
            return
        # NOTE: copy() is atomic, a comprehension over the original is not.
        recent = self._recent.copy().items()
        connection.execute('BEGIN IMMEDIATE')
        _insert(connection, {id: at for id, at in recent if mark <= at < end})
        _commit(connection, self._state(end, mtime))

    @contextmanager
    def _flushing(self) -> Iterator[bool]:
        """Take the flush lock if it is free; yield whether it was."""
        # A descriptor of its own: threads of a process exclude each other, too.
        fd = self._open_flush_lock()
        try:
            yield try_flock(fd)
        finally:
            os.close(fd)

    def _open_flush_lock(self) -> int:
        path = index_path(self._plants_path, '-synced')
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _unlock(self) -> None:
        if self._flush_lock >= 0:
            # Not by closing it alone: a child that was forked meanwhile has it, too.
            fcntl.flock(self._flush_lock, fcntl.LOCK_UN)
            os.close(self._flush_lock)
            self._flush_lock = -1

    # ---- the end

    def leave(self) -> None:
        """Close the index; the last process leaves the mark at the end.

        REQUIRES: all lines are known and synced.
        """
        self.close()
        with suppress(OSError), _write_errors(), self._flushing() as is_alone:
            if not is_alone:
                return
            with closing(_connect_for_writing(self._path)) as connection:
                connection.execute('PRAGMA busy_timeout = 0')
                connection.execute('PRAGMA synchronous = FULL')
                # It fails while another process has the index open.
                query = 'PRAGMA journal_mode = DELETE'
                if connection.execute(query).fetchone() == ('delete',):
                    mtime = os.fstat(self._plants).st_mtime_ns
                    self._flush_into(connection, mtime)

    def close(self) -> None:
        """Close the files, and undo what is not settled; it needs no lock."""
        with _reading:
            if self._readable is not None:
                self._readable.close()
                self._readable = None
        with _writing:
            if self._written is not None:
                self._written.close()
                self._written = None
                self._new.unlink(missing_ok=True)
        self._unlock()

    def abandon(self) -> None:
        """Close what a forked child has inherited, and what its own use would break.

        Two connections of one process share their locks. So a connection of the parent
        that stayed open would let one of the child take none.
        """
        if self._readable is not None:
            self._readable.close()
        # NOTE: not the other one: to close it would undo what the parent writes.
        _inherited.append(self._written)
        if self._flush_lock >= 0:
            os.close(self._flush_lock)

    def _state(self, mark: int, mtime: int | None = None) -> list[int | None]:
        return [self._inode, mark, tail_of(self._plants, mark), mtime]


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f'{path.as_uri()}?mode={mode}',
        uri=True,
        timeout=BUSY,
        isolation_level=None,
        check_same_thread=False,
    )


def _connect_for_writing(path: Path) -> sqlite3.Connection:
    """Return a connection that commits. REQUIRES: the flush lock."""
    connection = _connect(path, 'rw')
    try:
        connection.execute('PRAGMA synchronous = NORMAL')
        connection.execute('PRAGMA wal_autocheckpoint = 0')
        connection.execute('PRAGMA journal_mode = WAL')
    except BaseException:
        connection.close()
        raise
    return connection


def new_table(path: str, inode: int) -> sqlite3.Connection:
    """Return a connection to a new table, in a transaction.

    An unfinished table is removed, never rolled back. So it needs no journal, and no
    sync before the last one.

    Args:
        path: The URI of an empty file; or nothing, for a temporary table.
        inode: The inode of the plant file.
    """
    connection = sqlite3.connect(
        path, uri=True, isolation_level=None, check_same_thread=False
    )
    connection.executescript(
        'PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;'
        f'PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -{BUILD_CACHE_KIB};'
        f'{_SCHEMA}; INSERT INTO state VALUES ({inode}, 0, 0, NULL); BEGIN'
    )
    return connection


def _insert(connection: sqlite3.Connection, entries: dict[int, int]) -> None:
    """Insert the entries whose id is not there yet."""
    # Sorted, so that each page is changed once.
    rest = iter(sorted(entries.items()))
    while rows := dict(islice(rest, ROWS)):
        connection.execute(_INSERT, [json.dumps(rows)])


def _find(
    connection: sqlite3.Connection, ids: Iterable[int]
) -> tuple[int, dict[int, int]]:
    """Return the mark, and the offsets of those ids that are in the table."""
    found = dict(connection.execute(_FIND, [json.dumps(list(ids))]).fetchall())
    return int(found.pop(None)), found


def _commit(connection: sqlite3.Connection, state: list[int | None]) -> None:
    connection.execute(_UPDATE, state)
    connection.execute('COMMIT')


def _report(earlier: dict[int, int], entries: dict[int, int], repeat: Repeat) -> None:
    for id, first in earlier.items():
        if first != entries[id]:
            repeat(first, entries[id])


def tail_of(fd: int, end: int) -> int:
    """Return the CRC-32 of the last bytes of a file before an offset."""
    start = max(0, end - TAIL)
    return zlib.crc32(os.pread(fd, end - start, start))


def read_mark(path: Path, plants: int) -> int:
    """Return the mark of a plant file's index, or ``UNKNOWN``; nothing is made.

    Args:
        path: The path of the plant file.
        plants: A descriptor of the plant file.
    """
    with suppress(IndexDamaged), _read_errors():
        with closing(_connect(index_path(path), 'ro')) as connection:
            query = 'SELECT inode, mark FROM state'
            inode, mark = connection.execute(query).fetchone()
        if inode == os.fstat(plants).st_ino:
            return int(mark)
    return UNKNOWN
