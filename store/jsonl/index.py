"""The index of a plant file: from an id to the offset of its line.

Only the plant file is authoritative. The index has two parts, which meet at the *mark*,
an end of the plant file that was synced:

* The *table*, ``plants.jsonl.index``, is an SQLite file that all processes share. It
  has the ids of the lines before the mark. Ids and mark change in one transaction. So
  after a crash the table may be older than the plant file, never newer.
* The *recent ids*, of the lines from the mark on, are a dictionary in each process,
  read from the plant file. An add writes nothing to SQLite.

A *look* reads ids and mark of the table in one statement, and drops the recent ids
before this mark. So every line that this process knows is before the mark and in the
table, or after it and recent. The result stays true, whatever happens to the table.

A *flush* enters recent ids that are synced into the table, a second after an add. One
process at a time flushes, in a thread and without the lock of the plant file. A look
waits for no flush.

**A wrong answer would give an id twice.** A hit is verified: the caller reads the line.
A miss cannot be verified: it is believed if the files of the table still have their
names, belong together (``table.py``), and belong to the plant file (``table.State``).
If not, the index is built again.

Every method REQUIRES the lock of the plant file, unless it says otherwise.
"""

import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from store.jsonl import disk, table
from store.jsonl.lock import take_flock, try_flock
from store.jsonl.table import IndexDamaged, Offsets, State, reading, writing

MOST_RECENT = 100_000  # recent ids of a process that adds many plants
SORTED = 32_768  # recent ids that are sorted for a flush: it changes each page once
# Seconds between two looks for ids that are known to be free. A process that was idle
# looks: the mark shows what others have acknowledged, even if the file was cut short.
LOOK_WITHIN = 1.0
# Free ranges. Clients count up, each in a range of its own. With one range, above all
# ids, two clients had 0.87 of the adds of version 1.3.0 (64 connections); now 1.01.
MOST_FREE = 8
TAIL = 256  # bytes before the mark that are compared
UNKNOWN = -1  # an end of the plant file that is not known


class Index:
    """The index of a plant file (its path and descriptor), open in one process.

    ========  ============  ============  ==============================================
    state     build_reason  what is open  what it is for
    ========  ============  ============  ==============================================
    believed  None          the table     ``find``, ``learn``, ``enter``, ``flush``
    refused   a sentence    nothing       ``build`` leads to *building*
    building  a sentence    a new table   ``learn``; ``install`` leads to *believed*
    closed    as before     nothing       the last ``flush``
    ========  ============  ============  ==============================================

    It opens as *believed* or *refused* (if ``new``, always); ``close`` may come at any
    time. Without a table ``find`` raises ``IndexDamaged``. With a reason ``flush`` does
    nothing.
    """

    def __init__(self, path: Path, fd: int, *, new: bool = False) -> None:
        self._path = path
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._pid = os.getpid()
        self.build_reason: str | None = 'a new one is wanted'
        self._table: sqlite3.Connection | None = None
        self._table_path = table_path = disk.index_path(path)
        self._table_paths = [f'{table_path}{suffix}' for suffix in ('', '-wal', '-shm')]
        self._table_inodes: dict[str, int] = {}  # of those up to the first missing one
        self._unfinished: sqlite3.Connection | None = None  # the table being built
        self._unfinished_path: Path | None = None  # None for a temporary one
        # Ends of the plant file: ``file.py`` says who believes which.
        self._flushed = UNKNOWN
        self.mark = 0  # at the latest look
        self.synced = UNKNOWN
        self.end = 0
        self.tail = b''  # the last bytes before ``end``
        self._recent: Offsets = {}
        # Ranges without an id in the table at the latest look: each start by its end.
        self._free: dict[int, int] = {}
        self._look_until = 0.0  # when the latest look is too old
        if not new:
            try:
                self._open_table()
            except IndexDamaged as ex:
                self.build_reason = str(ex)
            finally:
                if self.build_reason is not None:
                    self.close()

    def _open_table(self) -> None:
        """Open the table, and check that it is that of the plant file as it is."""
        if not self._table_path.exists():
            raise IndexDamaged('there is none')
        with reading():
            self._table = table.connect(self._table_path)
            state = table.read_state(self._table)
            belongs_together = table.belongs_together(self._table_path, self._table)
            self._table_inodes = {}
            self._table_inodes = self._check_inodes()
        if state.inode != self._inode or state.mark < 0:
            raise IndexDamaged('it belongs to another file')
        # Even if the table is refused: recovery must cut off nothing before this end.
        self.synced = state.mark
        if not belongs_together:
            raise IndexDamaged('its files do not belong together')
        status = os.fstat(self._fd)
        found = status.st_size, status.st_mtime_ns
        if state.mtime is not None and (state.mark, state.mtime) != found:
            raise IndexDamaged('the plant file was changed while nobody had it open')
        if state.tail != zlib.crc32(self._read_tail(state.mark)):
            raise IndexDamaged('the plant file was changed in place')
        self.move_end(state.mark)  # last: a table that is refused knows no line
        self.mark = state.mark
        self.build_reason = None  # last: a flush has no lock

    def find(self, ids: Collection[int]) -> Offsets:
        """Return the offsets of those ids that are known."""
        found = {} if self._are_free(ids) else self._look(ids)
        recent = self._recent  # also lines that were added since that look
        return found | {id: recent[id] for id in ids if id in recent}

    def _are_free(self, ids: Collection[int]) -> bool:
        """Whether a look of the last second shows that the table has none of them."""
        left = ids
        for end, start in self._free.items():
            left = [id for id in left if not start <= id < end]
        return bool(ids) and not left and time.monotonic() < self._look_until

    def _look(self, ids: Collection[int]) -> Offsets:
        """Look ids up in the table; note its mark, and which ids are free."""
        with reading():
            if self._table is None:
                raise IndexDamaged('it is not open')
            look = table.look(self._table, ids)
            # After the read. A process that opens the index later makes a missing file
            # anew, and flushes into it: from then on this connection reads old pages.
            self._table_inodes = self._check_inodes()  # a flush makes -wal and -shm
        if look.mark < self.mark:
            raise IndexDamaged('it is an older one')
        self._look_until = time.monotonic() + LOOK_WITHIN
        self._free = look.free if len(look.free) <= MOST_FREE else {}
        if look.mark > self.mark:
            self.mark = mark = look.mark
            self._recent = {id: at for id, at in self._recent.items() if at >= mark}
            if mark > self.end:  # other processes have appended and flushed
                self.move_end(mark)
        return look.offsets

    def _check_inodes(self) -> dict[str, int]:
        """Return the inodes of the files of the table; the known ones must be there."""
        inodes = {}
        with suppress(FileNotFoundError):
            for path in self._table_paths:
                inodes[path] = os.stat(path).st_ino
        if not self._table_inodes.items() <= inodes.items():
            raise OSError('a file of it was removed or replaced')
        return inodes

    def learn(self, lines: list[tuple[int, int]], ids: Iterable[int] = ()) -> Offsets:
        """Enter ids and offsets of lines: in the new table, or as recent ids.

        Return the first offset of each id; of ``ids`` only if no table is being built.
        """
        if self._unfinished is None:
            found = self.find({*ids, *(id for id, _ in lines)})
            for id, offset in lines:
                if id not in found:
                    found[id] = self._recent[id] = offset
            return found
        firsts = dict(reversed(lines))
        with writing():
            changes = self._unfinished.total_changes
            # Sorted, so that scattered ids change each page once.
            table.insert(self._unfinished, dict(sorted(firsts.items())), 0, sys.maxsize)
            if self._unfinished.total_changes - changes < len(lines):  # some repeat ids
                firsts = table.look(self._unfinished, firsts).offsets
        return firsts

    def enter(self, offsets: Offsets, lines: bytes) -> None:
        """Enter the ids of lines that have just been appended."""
        self._recent.update(offsets)
        self.end += len(lines)
        self.tail = (self.tail + lines)[-TAIL:]

    def move_end(self, end: int) -> None:
        """Note that all ids up to an end are known."""
        self.end = end
        self.tail = self._read_tail(end)

    def tail_is_unchanged(self) -> bool:
        """Whether the bytes before ``end`` are still those that were there."""
        return self.tail == self._read_tail(self.end)

    def _read_tail(self, end: int) -> bytes:
        start = max(0, end - TAIL)
        return os.pread(self._fd, end - start, start)

    def flush_if_full(self) -> None:
        """Flush if a process that adds many plants has too many recent ids."""
        if len(self._recent) >= MOST_RECENT:
            with suppress(OSError):
                self.flush()  # the sync has succeeded, even if this fails

    def flush(self, *, is_last: bool = False) -> bool:
        """Enter the recent ids that are synced into the table; it needs no lock.

        Return False if another process flushes. ``is_last`` REQUIRES ``close``: the
        mtime is noted, too, if nobody else has the index open.
        """
        has_news = is_last or self.synced > self._flushed
        if self.build_reason is not None or not has_news:
            return True  # a table that is not believed stays as it is
        with writing(), disk.open_lock_file(self._path, self._fd) as lock:
            if not try_flock(lock.fileno()):
                return False
            self._check_inodes()
            with table.connect_for_writing(self._table_path) as connection:
                mtime = None
                if is_last and table.leave_wal(connection):
                    mtime = os.fstat(self._fd).st_mtime_ns
                state = table.read_state(connection)
                if state.inode != self._inode or state.mark < self.mark:
                    raise OSError('it belongs to another file, or is an older one')
                # NOTE: before the copy: ids entered later are after this end. A sync
                # may cover lines that this index has not read yet.
                end = max(state.mark, min(self.synced, self.end))
                if (state.mark, state.mtime) != (end, mtime):
                    connection.execute('BEGIN IMMEDIATE')
                    # NOTE: copy() is atomic; other threads enter ids meanwhile. The
                    # copy begins at or before ``state.mark``: so no id is missing.
                    recent = self._recent.copy()
                    if len(recent) >= SORTED:
                        recent = dict(sorted(recent.items()))
                    table.insert(connection, recent, state.mark, end)
                    table.commit(connection, self._state_at(end, mtime))
                self._flushed = end
                self._look_until = 0.0  # the next look drops what was entered
        return True

    def _state_at(self, mark: int, mtime: int | None) -> State:
        return State(self._inode, mark, zlib.crc32(self._read_tail(mark)), mtime)

    def build(self, *, temporary: bool = False) -> None:
        """Begin a new table, for all lines; ``install`` or ``close`` must follow.

        A temporary one only finds repeated ids: in memory they would need too much.
        """
        with writing():
            if not temporary:
                self._unfinished_path = disk.index_path(self._path, '-new')
                disk.remove(self._unfinished_path)
                os.close(disk.new_file(self._unfinished_path, self._fd))
            self._unfinished = table.new_table(self._unfinished_path)

    def install(self, end: int) -> None:
        """Use the new table. REQUIRES: it has all ids before ``end``, a synced end."""
        assert self._unfinished
        assert self._unfinished_path
        with writing(), disk.open_lock_file(self._path, self._fd) as lock:
            take_flock(self._path, lock.fileno())
            # As after a close: it is complete. The commit also syncs it.
            mtime = os.fstat(self._fd).st_mtime_ns
            table.commit(self._unfinished, self._state_at(end, mtime))
            self._unfinished.close()
            self._unfinished = None
            # NOTE: durably, or a power cut could leave an old -wal beside the table.
            disk.remove_index(self._path)
            os.rename(self._unfinished_path, self._table_path)
            disk.sync_directory(self._path)
            self._open_table()

    def close(self) -> None:
        """Close the files, and remove a table of this process that is not installed."""
        with reading():
            if self._table is not None:
                table.disconnect(self._table)
                self._table = None
        with writing():
            if self._unfinished is not None:
                self._unfinished.close()
                self._unfinished = None
                if self._unfinished_path is not None and self._pid == os.getpid():
                    self._unfinished_path.unlink(missing_ok=True)
