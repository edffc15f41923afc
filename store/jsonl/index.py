"""The index of a plant file: from an id to the offset of its line.

It is on disk and shared by all processes, so that a start costs the same with ten
plants and ten million. Only the plant file is truth. The index has two parts:

* The *table*, ``plants.jsonl.index``, is an SQLite file (``table.py``). It has the ids
  of the lines before the *mark*, an end of the plant file that was synced. Ids and mark
  change in one transaction. So after a crash the table may be behind the plant file,
  never ahead of it, and the lines from the mark on are read again.
* The *recent ids*, of the lines from the mark on, are a dictionary in each process,
  which reads them from the end of the plant file. So an add writes nothing to SQLite.

A *flush* enters recent ids that are synced into the table: a second after an add, or
sooner when there are many. One process at a time flushes, with a lock of its own, and
no reader waits for it.

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
import os
import sqlite3
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

from store.jsonl import table
from store.jsonl.disk import index_path, new_file, remove_index, sync_directory
from store.jsonl.lock import take_flock, try_flock
from store.jsonl.synced import UNKNOWN
from store.jsonl.table import IndexDamaged, State, reading, writing

# Recent ids, or bytes of the plant file behind the mark, after which a flush begins.
FLUSH_AT = 16_384
FLUSH_BYTES = 32 * 1024 * 1024
# A process that adds many plants flushes before it goes on when it has more recent ids.
MOST_RECENT = 100_000
# If more bytes are behind the mark, building the table anew takes less memory.
MOST_BEHIND = 64 * 1024 * 1024
CHUNK = 250_000  # ids in memory while a table is built
TAIL = 256  # bytes before the mark that are compared

# Called with the first offset of an id, and another offset of the same id.
Repeat = Callable[[int, int], None]


class Index:
    """The index of a plant file, as one process has it open.

    Args:
        path: The path of the plant file.
        plants: A descriptor of the plant file.
        new: Whether to build a new table, and not to read the present one.

    Attributes:
        mark: The mark, when the table was last read.
        end: The end of the plant file up to which the ids are known.
        synced: An end of the plant file that is known to be synced, or ``UNKNOWN``.
        reason: Why the table must be built, or ``None``.
    """

    def __init__(self, path: Path, plants: int, *, new: bool = False) -> None:
        self._plants_path = path
        self._path = index_path(path)
        self._new_path = index_path(path, '-new')
        self._lock_path = index_path(path, '-synced')
        self._plants = plants
        self._inode = os.fstat(plants).st_ino
        self._table: sqlite3.Connection | None = None
        self._files: list[int | None] = []  # the inodes of the table, -wal and -shm
        self._new: sqlite3.Connection | None = None  # the table that is being built
        self._recent: dict[int, int] = {}
        self._tail = b''  # the last bytes before the end
        self._paths = [f'{self._path}{suffix}' for suffix in ('', '-wal', '-shm')]
        self.mark = self.end = 0
        self.synced = UNKNOWN
        self.reason: str | None = 'a new one is wanted'
        if not new:
            try:
                self._load()
            except IndexDamaged as ex:
                self.reason = str(ex)
                self.close()

    def _load(self) -> None:
        if not self._path.exists():
            raise IndexDamaged('there is none')
        with reading():
            self._table = table.connect(self._path)
            state = table.read_state(self._table)
            self._files = self._inodes()
        if state.inode != self._inode:
            raise IndexDamaged('it is of another file')
        self.synced = state.mark
        status = os.fstat(self._plants)
        found = status.st_size, status.st_mtime_ns
        if state.mtime is not None and (state.mark, state.mtime) != found:
            raise IndexDamaged('the plant file was changed while nobody had it open')
        self.know(state.mark)
        if state.tail != zlib.crc32(self._tail):
            raise IndexDamaged('the plant file was changed in place')
        if status.st_size - state.mark > MOST_BEHIND:
            raise IndexDamaged('it is far behind the plant file')
        self.mark = state.mark
        self.reason = None

    # ---- finding ids

    def find(self, ids: Collection[int]) -> dict[int, int]:
        """Return the offsets of those ids that are known.

        The recent ids come after the table, and from one look at it: a look drops the
        recent ids before a new mark. Between two looks an id could be in neither.
        """
        with reading():
            if self._table is None:
                raise IndexDamaged('it is not open')
            mark, found = table.find(self._table, ids)
            files = self._inodes()
        # Checked after the read. A process that opens the index later makes a missing
        # file anew, and flushes into it: from then on this connection reads old pages.
        if files != self._files:
            # The first flush makes -wal and -shm.
            known = zip(files, self._files, strict=True)
            if any(old not in (None, new) for new, old in known):
                raise IndexDamaged('a file of it was removed or replaced')
            self._files = files
        if mark < self.mark:
            raise IndexDamaged('it is an older one')
        if mark > self.mark:
            self.mark = mark
            self._recent = {id: at for id, at in self._recent.items() if at >= mark}
            if mark > self.end:  # other processes have appended and flushed
                self.know(mark)
        recent = self._recent
        return found | {id: recent[id] for id in ids if id in recent}

    def _inodes(self) -> list[int | None]:
        inodes: list[int | None] = []
        for path in self._paths:
            try:
                inodes.append(os.stat(path).st_ino)
            except FileNotFoundError:
                inodes.append(None)
        return inodes

    # ---- learning ids

    def know(self, end: int) -> None:
        """Note that all ids up to an end are known."""
        self.end = end
        self._tail = read_tail(self._plants, end)

    def is_at_end(self) -> bool:
        """Whether the bytes before ``end`` are still those that were there."""
        return self._tail == read_tail(self._plants, self.end)

    def enter(self, offsets: dict[int, int], lines: bytes) -> None:
        """Enter the ids of lines that have just been appended."""
        self._recent.update(offsets)
        self.end += len(lines)
        self._tail = (self._tail + lines)[-TAIL:]

    def learn(
        self,
        records: Iterable[tuple[int, int]],
        repeat: Repeat,
        ids: Iterable[int] = (),
    ) -> dict[int, int]:
        """Enter the ids of the lines from ``end`` on, as recent ids.

        Args:
            records: Ids and offsets, in the order of the file.
            repeat: See ``Repeat``.
            ids: What to find; one query finds these and repeated ids.

        Returns:
            The offsets of those ids that are known then.
        """
        new: dict[int, int] = {}
        for id, offset in records:
            first = self._recent.get(id)
            if first is None:
                first = new.setdefault(id, offset)
            if first != offset:
                repeat(first, offset)
        found = self.find({*ids, *new})
        _report_repeats(found, new, repeat)
        self._recent.update(new)
        return found | {id: new[id] for id in ids if id in new}

    def build(
        self,
        records: Iterable[tuple[int, int]],
        repeat: Repeat,
        *,
        temporary: bool = False,
    ) -> None:
        """Enter the ids of all lines into a new table; ``install`` must follow.

        Args:
            records: Ids and offsets, in the order of the file.
            repeat: See ``Repeat``.
            temporary: Build a table that is never used; ``close`` must follow.
        """
        with writing():
            if not temporary:
                self._new_path.unlink(missing_ok=True)
                os.close(new_file(self._new_path, os.fstat(self._plants)))
            self._new = new = table.new_table(None if temporary else self._new_path)
        records = iter(records)
        while chunk := list(islice(records, CHUNK)):
            entries: dict[int, int] = {}
            for id, offset in chunk:
                if entries.setdefault(id, offset) != offset:
                    repeat(entries[id], offset)
            earlier: dict[int, int] = {}
            with writing():
                changes = new.total_changes
                # Sorted, so that scattered ids change each page once.
                table.insert(new, dict(sorted(entries.items())), 0, sys.maxsize)
                if new.total_changes - changes < len(entries):
                    _, earlier = table.find(new, entries)
            _report_repeats(earlier, entries, repeat)

    def install(self, end: int) -> None:
        """Use the new table. REQUIRES: it has all ids before an end, which is synced.

        Raises:
            OSError: It cannot be written, or another process does not end its flush.
        """
        assert self._new is not None
        with writing(), self._flush_lock() as lock:
            take_flock(self._plants_path, lock)
            table.commit(self._new, self._state(end))
            self._new.close()
            self._new = None
            fd = os.open(self._new_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            remove_index(self._plants_path)
            # NOTE: or a power cut could leave an old -wal beside the new table.
            sync_directory(self._path)
            os.rename(self._new_path, self._path)
            sync_directory(self._path)
        self._load()

    # ---- flushing

    def is_full(self) -> bool:
        """Whether a flush should begin at once."""
        return len(self._recent) >= FLUSH_AT or self.end - self.mark >= FLUSH_BYTES

    def is_overfull(self) -> bool:
        """Whether a process that adds many plants should wait for a flush."""
        return len(self._recent) >= MOST_RECENT

    def flush(self, *, is_last: bool = False) -> bool:
        """Enter the recent ids that are synced into the table; it needs no lock.

        Args:
            is_last: Also note that nobody has the plant file open, if that is so.

        Returns:
            Whether this was done; false while another process flushes.

        Raises:
            OSError: The table cannot be written.
        """
        with writing(), self._flush_lock() as lock:
            if not try_flock(lock):
                return False
            with closing(table.connect_for_writing(self._path)) as connection:
                mtime = None
                if is_last and table.leave_wal(connection):
                    mtime = os.fstat(self._plants).st_mtime_ns
                self._flush_into(connection, mtime)
                if mtime is None:
                    table.checkpoint(connection, self._path)
        return True

    def _flush_into(self, connection: sqlite3.Connection, mtime: int | None) -> None:
        state = table.read_state(connection)
        if state.inode != self._inode or state.mark < self.mark:
            raise OSError(errno.ESTALE, 'it is of another file')
        # NOTE: first: the ids that are entered meanwhile are behind it.
        end = max(state.mark, self.synced)
        if (state.mark, state.mtime) != (end, mtime):
            connection.execute('BEGIN IMMEDIATE')
            # NOTE: copy() is atomic; other threads enter ids meanwhile.
            recent = self._recent.copy()
            if len(recent) > 2 * FLUSH_AT:  # a bulk add: change each page once
                recent = dict(sorted(recent.items()))
            table.insert(connection, recent, state.mark, end)
            table.commit(connection, self._state(end, mtime))

    @contextmanager
    def _flush_lock(self) -> Iterator[int]:
        """Open the file of the flush lock; yield its descriptor.

        A descriptor of its own: threads of a process exclude each other, too.
        """
        try:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as ex:  # the next look at the plant file makes it
            raise OSError(errno.ESTALE, 'a file of the index was removed') from ex
        try:
            yield fd
        finally:
            os.close(fd)

    def _state(self, mark: int, mtime: int | None = None) -> State:
        tail = zlib.crc32(read_tail(self._plants, mark))
        return State(self._inode, mark, tail, mtime)

    # ---- the end

    def leave(self, end: int) -> None:
        """Close the index for good. REQUIRES: all ids before an end, which is synced.

        If no other process has it open, it is marked as complete.
        """
        self.synced = end
        self.close()
        with suppress(OSError):
            self.flush(is_last=True)

    def close(self) -> None:
        """Close the files, and remove a table that is not installed."""
        with reading():
            if self._table is not None:
                table.disconnect(self._table)
                self._table = None
        with writing():
            if self._new is not None:
                self._new.close()
                self._new = None
                self._new_path.unlink(missing_ok=True)


def _report_repeats(
    earlier: dict[int, int], entries: dict[int, int], repeat: Repeat
) -> None:
    for id, first in earlier.items():
        if entries.get(id, first) != first:
            repeat(first, entries[id])


def read_tail(fd: int, end: int) -> bytes:
    """Return the last bytes of a file before an offset."""
    start = max(0, end - TAIL)
    return os.pread(fd, end - start, start)
