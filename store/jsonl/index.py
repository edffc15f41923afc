"""The index of a plant file: from an id to the offset of its line.

Only the plant file is authoritative. The index has two parts:

* The *table*, ``plants.jsonl.index``, is an SQLite file that all processes share. It
  has the ids of the lines before the *mark*, an end of the plant file that was synced.
  Ids and mark change in one transaction. So after a crash the table may be older than
  the plant file, never newer.
* The *recent ids*, of the lines from the mark on, are a dictionary in each process,
  read from the plant file. An add writes nothing to SQLite.

**When an id counts as taken.** A *look* reads ids and mark of the table in one
statement, and then the recent ids from this mark on. So every line that this process
knows is before the mark and in the table, or after it and recent. A *flush* enters
recent ids that are synced into the table, a second after an add. One process at a time
flushes, in a thread and without the lock of the plant file, and a look waits for none:

* A flush leaves the recent ids as they are. The next look drops those before its mark:
  until then both parts have them.
* A flush takes an end, copies the recent ids, and enters those before that end. The
  copy begins at the mark of the latest look or before it, and the mark of the table is
  never lower than that mark: so no id is missing.

So the result of a look stays true, whatever happens to the table. If a look does not
find an id, no id up to the next one in the table needs a look for a second: clients
count up, each in a range of its own. (With one range, above all ids, two clients had
0.87 of the adds of version 1.3.0 at 64 connections; now it is 1.01.) A worker that was
idle looks: the mark shows what others have acknowledged, even if the plant file was cut
short meanwhile.

**A wrong answer would give an id twice.** A hit is verified: the caller reads the line.
A miss is believed if the files that SQLite has read still have their names, belong
together (``table.py``), and belong to the plant file. The table notes the inode of that
file (not the device, whose number changes with a mount), a checksum of the 256 bytes
before the mark, and, when the last process closes the index, the size and the mtime. If
any of this fails, the index is built again. An index that is changed in place while it
is in use may end a process (SIGBUS).

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
from store.jsonl.table import IndexDamaged, State, reading, writing

MOST_RECENT = 100_000  # recent ids of a process that adds many plants
SORTED = 32_768  # recent ids that are sorted for a flush: it changes each page once
LOOK_WITHIN = 1.0  # seconds between two looks for ids that are known to be free
MOST_FREE = 8  # ranges; a client that counts up has one
TAIL = 256  # bytes before the mark that are compared
UNKNOWN = -1  # an end of the plant file that is not known
INDEX_REPLACED = 'a file of it was removed or replaced'


class Index:
    """The index of a plant file (its path and descriptor), open in one process.

    It is in one of four states:

    * *believed*: ``reason`` is None, and a table is open;
    * *refused*: ``reason`` says why, and no file is open; always if ``new``;
    * *being built*, after ``build``: it learns all ids; ``install`` makes it believed;
    * *closed*, after ``close``, which may come at any time.
    """

    def __init__(self, path: Path, plants: int, *, new: bool = False) -> None:
        self._plants_path = path
        self._path = disk.index_path(path)
        self._plants = plants
        self._inode = os.fstat(plants).st_ino
        self._table: sqlite3.Connection | None = None
        self._paths = [f'{self._path}{suffix}' for suffix in ('', '-wal', '-shm')]
        self._files: dict[str, int] = {}  # inodes, up to the first that is missing
        self._new: sqlite3.Connection | None = None  # the table that is being built
        self._new_path: Path | None = None  # None for a temporary one
        self._pid = os.getpid()
        self._recent: dict[int, int] = {}
        self._flushed = UNKNOWN  # the mark after the latest flush by this process
        self.tail = b''  # the last bytes before the end
        self.mark = 0  # of the table, at the latest look
        # Ranges without an id in the table, at the latest look: lines that were added
        # since are recent.
        self._free: list[tuple[int, int]] = []
        self._look_until = 0.0  # when the latest look is too old
        self.end = 0  # of the plant file, up to which the ids are known
        self.synced = UNKNOWN  # an end that was synced
        self.reason: str | None = 'a new one is wanted'  # why the table must be built
        if not new:
            try:
                self._load()
            except IndexDamaged as ex:
                self.reason = str(ex)
            finally:
                if self.reason is not None:
                    self.close()

    def _load(self) -> None:
        if not self._path.exists():
            raise IndexDamaged('there is none')
        with reading():
            self._table = table.connect(self._path)
            state = table.read_state(self._table)
            belongs_together = table.belongs_together(self._path, self._table)
            self._files = self._inodes()
        if state.inode != self._inode or state.mark < 0:
            raise IndexDamaged('it belongs to another file')
        self.synced = state.mark  # also if the table is not believed
        if not belongs_together:
            raise IndexDamaged('its files do not belong together')
        status = os.fstat(self._plants)
        found = status.st_size, status.st_mtime_ns
        if state.mtime is not None and (state.mark, state.mtime) != found:
            raise IndexDamaged('the plant file was changed while nobody had it open')
        if state.tail != zlib.crc32(self._read_tail(state.mark)):
            raise IndexDamaged('the plant file was changed in place')
        self.move_end(state.mark)  # last: a table that is not believed knows no line
        self.mark = state.mark
        self.reason = None

    def find(self, ids: Collection[int]) -> dict[int, int]:
        """Return the offsets of those ids that are known."""
        recent = self._recent
        unknown = ids
        for start, end in self._free:
            unknown = [id for id in unknown if not start <= id < end]
        if ids and not unknown and time.monotonic() < self._look_until:
            return {id: recent[id] for id in ids if id in recent}
        with reading():
            if self._table is None:
                raise IndexDamaged('it is not open')
            mark, found, followers = table.look(self._table, ids)
            files = self._inodes()
        # Checked after the read. A process that opens the index later makes a missing
        # file anew, and flushes into it: from then on this connection reads old pages.
        if not self._files.items() <= files.items():
            raise IndexDamaged(INDEX_REPLACED)
        self._files = files  # the first flush makes -wal and -shm
        if mark < self.mark:
            raise IndexDamaged('it is an older one')
        self._look_until = time.monotonic() + LOOK_WITHIN
        starts: dict[int, int] = {}
        for id, end in followers.items():
            starts[end] = min(id, starts.get(end, id))
        ranges = [(start, end) for end, start in starts.items()]
        self._free = ranges if len(ranges) <= MOST_FREE else []
        if mark > self.mark:
            self.mark = mark
            self._recent = recent = {id: at for id, at in recent.items() if at >= mark}
            if mark > self.end:  # other processes have appended and flushed
                self.move_end(mark)
        return found | {id: recent[id] for id in ids if id in recent}

    def _inodes(self) -> dict[str, int]:
        inodes = {}
        with suppress(FileNotFoundError):
            for path in self._paths:
                inodes[path] = os.stat(path).st_ino
        return inodes

    def move_end(self, end: int) -> None:
        """Note that all ids up to an end are known."""
        self.end = end
        self.tail = self._read_tail(end)

    def tail_is_unchanged(self) -> bool:
        """Whether the bytes before ``end`` are still those that were there."""
        return self.tail == self._read_tail(self.end)

    def _read_tail(self, end: int) -> bytes:
        start = max(0, end - TAIL)
        return os.pread(self._plants, end - start, start)

    def enter(self, offsets: dict[int, int], lines: bytes) -> None:
        """Enter the ids of lines that have just been appended."""
        self._recent.update(offsets)
        self.end += len(lines)
        self.tail = (self.tail + lines)[-TAIL:]

    def learn(
        self, lines: list[tuple[int, int]], ids: Iterable[int] = ()
    ) -> dict[int, int]:
        """Enter ids and offsets of lines: in the new table, or as recent ids.

        Return the first offset of each id; of ``ids`` only if no table is being built.
        """
        if self._new is None:
            found = self.find({*ids, *(id for id, _ in lines)})
            for id, offset in lines:
                if id not in found:
                    found[id] = self._recent[id] = offset
            return found
        firsts = dict(reversed(lines))
        with writing():
            changes = self._new.total_changes
            # Sorted, so that scattered ids change each page once.
            table.insert(self._new, dict(sorted(firsts.items())), 0, sys.maxsize)
            if self._new.total_changes - changes < len(lines):
                _, firsts, _ = table.look(self._new, firsts)
        return firsts

    def build(self, *, temporary: bool = False) -> None:
        """Begin a new table, for all lines; ``install`` or ``close`` must follow.

        A temporary one only finds repeated ids: in memory they would need too much.
        """
        with writing():
            if not temporary:
                self._new_path = disk.index_path(self._plants_path, '-new')
                disk.remove(self._new_path)
                os.close(disk.new_file(self._new_path, self._plants))
            self._new = table.new_table(self._new_path)

    def install(self, end: int) -> None:
        """Use the new table. REQUIRES: it has all ids before ``end``, a synced end."""
        assert self._new
        assert self._new_path
        with writing(), disk.open_lock_file(self._plants_path, self._plants) as lock:
            take_flock(self._plants_path, lock.fileno())
            # As after a close: it is complete. The commit also syncs it.
            mtime = os.fstat(self._plants).st_mtime_ns
            table.commit(self._new, self._state(end, mtime))
            self._new.close()
            self._new = None
            # NOTE: durably, or a power cut could leave an old -wal beside the table.
            disk.remove_index(self._plants_path)
            os.rename(self._new_path, self._path)
            disk.sync_directory(self._path)
            self._load()

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
        if self.reason is not None or (self.synced <= self._flushed and not is_last):
            return True  # a table that is not believed stays as it is
        with writing(), disk.open_lock_file(self._plants_path, self._plants) as lock:
            if not try_flock(lock.fileno()):
                return False
            if not self._files.items() <= self._inodes().items():
                raise OSError(INDEX_REPLACED)
            with table.connect_for_writing(self._path) as connection:
                mtime = None
                if is_last and table.leave_wal(connection):
                    mtime = os.fstat(self._plants).st_mtime_ns
                state = table.read_state(connection)
                if state.inode != self._inode or state.mark < self.mark:
                    raise OSError('it belongs to another file, or is an older one')
                # NOTE: before the copy: ids entered later are after this end. A sync
                # may cover lines that this index has not read yet.
                end = max(state.mark, min(self.synced, self.end))
                if (state.mark, state.mtime) != (end, mtime):
                    connection.execute('BEGIN IMMEDIATE')
                    # NOTE: copy() is atomic; other threads enter ids meanwhile.
                    recent = self._recent.copy()
                    if len(recent) >= SORTED:
                        recent = dict(sorted(recent.items()))
                    table.insert(connection, recent, state.mark, end)
                    table.commit(connection, self._state(end, mtime))
                self._flushed = end
                self._look_until = 0.0  # the next look drops what was entered
        return True

    def _state(self, mark: int, mtime: int | None) -> State:
        return State(self._inode, mark, zlib.crc32(self._read_tail(mark)), mtime)

    def close(self) -> None:
        """Close the files, and remove a table of this process that is not installed."""
        with reading():
            if self._table is not None:
                table.disconnect(self._table)
                self._table = None
        with writing():
            if self._new is not None:
                self._new.close()
                self._new = None
                if self._new_path is not None and self._pid == os.getpid():
                    self._new_path.unlink(missing_ok=True)
