"""The index of a plant file: from an id to the offset of its line.

The ids are on disk, in SQLite files beside the plant file, so that a start costs the
same with ten plants and ten million, and no worker holds a copy. These files are
disposable: only the plant file is truth. The index has three parts:

* The *recent ids*, a dictionary in each process: the latest ids, at most some 35,000.
  Each process reads them from the end of the plant file, which is quick, so that an add
  writes nothing to SQLite.
* *Generations*, ``plants.jsonl.index-<random>``: SQLite files, each with the ids of a
  span of the plant file, from the *end* of the generation before it to its own end. **A
  generation is never changed once it is in use.** When there are many recent ids, a
  background thread makes a generation of them. If there would be too many generations,
  it merges the latest ones into the new one. An id is seldom copied.
* The *manifest*, ``plants.jsonl.index``, names the generations. It has three sectors of
  512 bytes, each of them a line with a CRC-32, written in place::

      0     the plant file (device, inode) and the generations
      512   the *seal*: size and mtime of the plant file after its latest append, and
            the CRC-32 of its last 256 bytes
      1024  an end of the plant file that is known to have been synced

**A wrong answer must be impossible, whatever happens to these files.** A hit is
verified: the caller reads the line and compares the id. A false miss would let a second
plant with that id in, so a miss must be certain too:

* A generation is believed only if its inode, size and ctime are those of when it was
  finished, which is checked *after* each lookup. So no byte of it can have changed, and
  a mixture of new and old pages is not believed either.
* Most ids are new, and the *filter* of a generation says so without a lookup: a Bloom
  filter, which each process reads into memory when it opens the file. It may take a new
  id for a known one, never a known one for a new one.
* A generation is synced before the manifest names it, and the lines that it knows were
  synced before that. The manifest is synced before the generations that it no longer
  names are removed.
* If the plant file has the size of its latest append but another mtime, it was edited
  in place. Bytes before the end of a generation are compared, too.

NOTE: not the WAL mode of SQLite. Its ``-shm`` file is a memory map: if it is emptied,
every process that reads it dies (SIGBUS). SQLite does not verify the checksums of pages
that it reads from the WAL, and pages of the main file have none, so an old page would
give a miss that looks sound. Here no file is mapped, and none changes while it is read.

Every method REQUIRES the lock of the plant file, unless it says otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import sqlite3
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from store.jsonl.lock import try_flock

# A merge begins when there are so many recent ids, or when so many bytes of the plant
# file follow the end of the last generation.
MERGE_AT = 16_384
MERGE_BYTES = 32 * 1024 * 1024
FLUSH_AT = 250_000  # ids in memory while a draft is written
ROWS = 100  # of an INSERT, which takes 1.7 us a row; a row alone takes 2.8
# Instructions of SQLite between two pauses of a merge. 13 of them insert a row.
PAUSE_AFTER = 6_000
# Caches of SQLite. While an index is built, scattered ids change nearly every
# page again and again: with a small cache each page is written a hundred times.
BUILD_CACHE_KIB = 256 * 1024
MERGE_CACHE_KIB = 4 * 1024
LOOKUP_CACHE_KIB = 256
# The sector has room for so many generations. A merge that would make one more copies
# the latest one, and each before it that is not FACTOR times as large as what follows.
# So an id is copied seven times until there are ten million.
GENERATIONS = 4
FACTOR = 2
ID_BYTES = 16  # of a generation, about
# Bits of the filter for each id, unless it would have more bytes than each worker may
# hold of one filter.
FILTER_BITS = 12
MAX_FILTER_BYTES = 10 * 1024 * 1024
FILTER_ROW_BYTES = 64 * 1024
# Seconds. File systems stamp a change with the latest tick of the kernel's clock: a
# change within the same tick does not show in the ctime.
TICK = 0.02

UNKNOWN = -1
SECTOR = 512  # bytes
TAIL = 256  # bytes before the end of a generation that are compared

_SCHEMA = 'CREATE TABLE plants (id INTEGER PRIMARY KEY, offset INTEGER NOT NULL)'
_FILTER = 'CREATE TABLE bloom (words BLOB NOT NULL)'

# The bits of an id, all in one word of the filter, scattered because many ids are
# consecutive. So 1.3 % of new ids look like known ones, 3 % if there are ten million.
# Filters are on disk: after a change of the bits, or of the choice of the word, rename
# the table.
_PRIME = 4093
_BITS = [
    1 << n**2 % _PRIME % 64
    | 1 << n**3 % _PRIME % 64
    | 1 << n**5 % _PRIME % 64
    | 1 << n**7 % _PRIME % 64
    for n in range(_PRIME)
]


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


# Two, so that lookups do not wait for a merge. A fork first waits for the second one.
_reading, _writing = _lock_of_sqlite(), _lock_of_sqlite()

# The open generations of indexes that a forked child has inherited from its parent.
_inherited: list[dict[Stamp, Generation]] = []

# Called with the first offset of an id, and another offset of the same id.
Repeat = Callable[[int, int], None]


class IndexDamaged(Exception):
    """The index cannot be believed and must be built again."""


class Stamp(NamedTuple):
    """A generation, as the manifest names it."""

    name: str  # the random part
    end: int  # of the plant file, up to which it knows the ids
    tail: int  # CRC-32 of the bytes of the plant file before the end
    inode: int  # of the finished SQLite file, like size and ctime
    size: int
    ctime: int


def tail_of(fd: int, end: int) -> int:
    """Return the CRC-32 of the bytes of a file before an offset."""
    start = max(0, end - TAIL)
    return zlib.crc32(os.pread(fd, end - start, start))


class Generation:
    """A finished SQLite file; any use raises ``IndexDamaged`` if it has changed."""

    def __init__(self, base: Path, stamp: Stamp) -> None:
        self.stamp = stamp
        self._path = generation_path(base, stamp.name)
        # NOTE: immutable: no locks, and no look at a journal; there is none.
        self.uri = f'file:{quote(os.fsencode(self._path))}?mode=ro&immutable=1'
        with _damage():
            self._connection = sqlite3.connect(
                self.uri, uri=True, isolation_level=None, check_same_thread=False
            )
        try:
            with _damage():
                self._connection.execute('PRAGMA mmap_size = 0')
                self._connection.execute(f'PRAGMA cache_size = -{LOOKUP_CACHE_KIB}')
                self.filter = array('Q')
                query = 'SELECT words FROM bloom ORDER BY rowid'
                for (words,) in self._connection.execute(query):
                    self.filter.frombytes(words)
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise ``IndexDamaged`` if the file was changed or replaced."""
        with _damage():
            status = os.stat(self._path)
        if (status.st_ino, status.st_size, status.st_ctime_ns) != self.stamp[3:]:
            raise IndexDamaged('a file of it was changed')

    def find(self, ids: Sequence[int]) -> dict[int, int]:
        """Return the offsets of the ids that are in this generation."""
        words, size = self.filter, len(self.filter)
        maybe = [
            id for id in ids if words[id % size] & (bits := _BITS[id % _PRIME]) == bits
        ]
        found: dict[int, int] = {}
        with _damage():
            for id in maybe:
                query = 'SELECT offset FROM plants WHERE id = ?'
                for (offset,) in self._connection.execute(query, [id]):
                    found[id] = offset
        if maybe:
            self.check()
        return found

    def close(self) -> None:
        with _reading:
            self._connection.close()


@contextmanager
def _damage() -> Iterator[None]:
    """Raise ``IndexDamaged`` for a file that cannot be read."""
    try:
        with _reading:
            yield
    # A damaged filter raises TypeError or ValueError.
    except (sqlite3.Error, OSError, TypeError, ValueError) as ex:
        raise IndexDamaged(str(ex)) from ex


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise ``OSError`` for a file that SQLite cannot write."""
    try:
        with _writing:
            yield
    except (sqlite3.Error, TypeError) as ex:  # TypeError: a row is missing
        raise OSError(errno.EIO, f'the index cannot be written: {ex}') from ex


def _unlocked(pause: Callable[[], bool]) -> bool:
    """Pause in a statement; a fork need not wait for it.

    SQLite calls this between two instructions, without a lock that others could need.
    """
    _writing.release()
    try:
        return pause()
    finally:
        _writing.acquire()


class Draft:
    """A generation that is being written; it is removed if that fails.

    While it is open it has a lock of its own, so that no process takes it for a file
    that a dead process has left. It needs no lock of the plant file.

    Args:
        base: The path of the manifest.
        like: The status of the plant file, for mode and owner.
        ids: The approximate number of ids that it will have.
        cache: SQLite's cache while it is written, in KiB.
        system: The system calls.
        pause: Called after each ``PAUSE_AFTER``, and may take long; writing fails when
            it returns true.
    """

    def __init__(
        self,
        base: Path,
        like: os.stat_result,
        ids: int,
        cache: int = MERGE_CACHE_KIB,
        system: Any = os,
        pause: Callable[[], bool] | None = None,
    ) -> None:
        self._name = secrets.token_hex(8)
        self._path = generation_path(base, self._name)
        self._system = system
        words = min(FILTER_BITS * ids // 64, MAX_FILTER_BYTES // 8) | 1
        self._filter = array('Q', [0]) * words
        self._fd = new_file(self._path, like, system)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # An unfinished draft is removed, never rolled back. So it needs no journal,
            # and no sync before the last one.
            with _disk_errors():
                self._connection = sqlite3.connect(
                    f'file:{quote(os.fsencode(self._path))}',
                    uri=True,
                    isolation_level=None,
                    check_same_thread=False,
                )
                for pragma in (
                    'journal_mode = OFF',
                    'synchronous = OFF',
                    'locking_mode = EXCLUSIVE',
                    'mmap_size = 0',
                    f'cache_size = -{cache}',
                ):
                    self._connection.execute(f'PRAGMA {pragma}')
                self._connection.execute(_SCHEMA)
                if pause is not None:
                    handler = partial(_unlocked, pause)
                    self._connection.set_progress_handler(handler, PAUSE_AFTER)
        except BaseException:
            self.__exit__(True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with _writing, suppress(AttributeError):  # the connection was not made
            self._connection.close()
        if error:
            with suppress(OSError):
                self._system.unlink(self._path)
        os.close(self._fd)

    def absorb(self, generation: Generation) -> None:
        """Add all ids of a generation."""
        execute = self._connection.execute
        is_first = not self._connection.total_changes
        with _disk_errors():
            execute('ATTACH ? AS old', [generation.uri])
            execute('INSERT OR IGNORE INTO plants SELECT * FROM old.plants')
            if is_first and 2 * len(generation.filter) >= len(self._filter):
                # Shared: the absorbed filter gets more bits, which do no harm.
                self._filter = generation.filter
            else:
                # Many ids a row: a thread that reads a row must wait for the GIL.
                query = (
                    'SELECT group_concat(id), max(id) FROM (SELECT id FROM old.plants '
                    f'WHERE id > ? ORDER BY id LIMIT {ROWS})'
                )
                ids, last = execute(query, [-math.inf]).fetchone()
                while ids:
                    self._mark(map(int, ids.split(',')))
                    ids, last = execute(query, [last]).fetchone()
            execute('DETACH old')
        generation.check()

    def extend(self, entries: Iterable[tuple[int, int]], repeat: Repeat) -> None:
        """Add ids and their offsets, in the order of the file."""
        entries = iter(entries)
        execute = self._connection.execute
        # In the order of ids, so that a batch changes each page once.
        while batch := sorted(islice(entries, FLUSH_AT), key=itemgetter(0)):
            with _disk_errors():
                changes = self._connection.total_changes
                execute('BEGIN')
                for start in range(0, len(batch), ROWS):
                    rows = batch[start : start + ROWS]
                    values = ', '.join(['(?, ?)'] * len(rows))
                    query = f'INSERT OR IGNORE INTO plants VALUES {values}'
                    flat = list(chain.from_iterable(rows))
                    execute(query, flat)
                    self._mark(flat[::2])
                if self._connection.total_changes - changes < len(batch):
                    for id, offset in batch:
                        query = 'SELECT offset FROM plants WHERE id = ?'
                        (first,) = execute(query, [id]).fetchone()
                        if first != offset:
                            repeat(first, offset)
                execute('COMMIT')

    def _mark(self, ids: Iterable[int]) -> None:
        words, size = self._filter, len(self._filter)
        for id in ids:
            words[id % size] |= _BITS[id % _PRIME]

    def finish(self, plants: int, end: int) -> Stamp:
        """Return the stamp of the finished file, which is durable."""
        with _disk_errors():
            self._connection.execute(_FILTER)
            self._connection.execute('BEGIN')
            with memoryview(self._filter).cast('B') as view:
                pieces = (
                    [view[at : at + FILTER_ROW_BYTES]]
                    for at in range(0, len(view), FILTER_ROW_BYTES)
                )
                self._connection.executemany('INSERT INTO bloom VALUES (?)', pieces)
            self._connection.execute('COMMIT')
            self._connection.close()
        self._system.fsync(self._fd)
        time.sleep(TICK)
        status = os.fstat(self._fd)
        identity = status.st_ino, status.st_size, status.st_ctime_ns
        return Stamp(self._name, end, tail_of(plants, end), *identity)


class Merge(NamedTuple):
    """The plan of a merge: generations and recent ids that become one generation."""

    kept: list[Stamp]  # generations that stay
    absorbed: list[Stamp]  # generations that become part of the new one
    recent: dict[int, int]
    end: int  # of the new generation
    ids: int  # of the new generation, about


class Index:
    """The index of a plant file, as one process has it open.

    Every method that reads the files raises ``IndexDamaged`` if they are not believed.

    Args:
        path: The path of the manifest.
        plants: A descriptor of the plant file.
        system: The system calls.

    Attributes:
        end: The end of the plant file up to which the ids are known.
        synced: An end of the plant file that is known to have been synced, or
            ``UNKNOWN``.
    """

    def __init__(self, path: Path, plants: int, system: Any = os) -> None:
        self._path = path
        self._plants = plants
        self._system = system
        status = os.fstat(plants)
        self._identity = [status.st_dev, status.st_ino]
        self._fd = -1
        self._guard = threading.Lock()  # guards the descriptor where the lock is free
        self._head = b''  # the first sector; empty if the manifest is not believed
        self._generations: dict[Stamp, Generation] = {}
        self._recent: dict[int, int] = {}
        self._sealed = UNKNOWN  # the size of the plant file, if the seal has that size
        self.end = 0
        self.synced = UNKNOWN

    # ---- opening

    def load(self) -> str | None:
        """Read the manifest; return ``None``, or why it is not believed."""
        try:
            self._fd = self._system.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            head, seal, synced = self._read()
            status = os.fstat(self._plants)
            identity, *stamps = json.loads(_open_sector(head))
            if identity != self._identity:
                raise IndexDamaged('it is of another file')
            self.synced = int(_open_sector(synced))
            if status.st_size < self.synced:
                raise IndexDamaged('the plant file was cut short')
            size = self._check_seal(seal, status)
            self._use(stamps)
        except (IndexDamaged, OSError, ValueError, TypeError) as ex:
            self.close()
            return 'there is none' if isinstance(ex, FileNotFoundError) else str(ex)
        # After a crash the seal may describe an append that was lost. Then the manifest
        # is written again, with another seal.
        self._head = b'' if status.st_size < size else head
        return None

    def _check_seal(self, seal: bytes, status: os.stat_result) -> int:
        """Return the size of the plant file after its latest append."""
        size, mtime, tail = map(int, _open_sector(seal).split())
        if size == status.st_size:
            is_ours = mtime == status.st_mtime_ns
        else:
            is_ours = size > status.st_size or tail == tail_of(self._plants, size)
        if not is_ours:
            raise IndexDamaged('the plant file was changed in place')
        return size

    def _use(self, stamps: Sequence[Any]) -> None:
        """Open the generations that the manifest names, and close all others."""
        stamps = [Stamp(*stamp) for stamp in stamps]
        if max((stamp.end for stamp in stamps), default=0) < self._start():
            # The ids between the two ends are no longer in the recent ids.
            raise IndexDamaged('its manifest is an old one')
        for stamp in stamps:
            if stamp not in self._generations:
                if stamp.tail != tail_of(self._plants, stamp.end):
                    raise IndexDamaged('it is of another file')
                self._generations[stamp] = Generation(self._path, stamp)
        for stamp in set(self._generations).difference(stamps):
            self._generations.pop(stamp).close()
        start = self._start()
        self.end = max(self.end, start)
        self._recent = {
            id: offset for id, offset in self._recent.items() if offset >= start
        }

    def _stamps(self) -> list[Stamp]:
        return sorted(self._generations, key=lambda stamp: stamp.end)

    def _start(self) -> int:
        """Return the offset from which on ids are in the recent ids."""
        return max((stamp.end for stamp in self._generations), default=0)

    def catch_up(
        self,
        records: Iterable[tuple[int, int]],
        repeat: Repeat,
        sync: Callable[[], None],
    ) -> None:
        """Enter the records from ``end`` on, and write the manifest.

        Args:
            records: Ids and offsets, in the order of the file.
            repeat: See ``Repeat``.
            sync: Makes the plant file durable.
        """
        records = iter(records)
        first = list(islice(records, MERGE_AT))
        if len(first) < MERGE_AT:
            self.enter_records(first, repeat)
            sync()
            self._install(self._stamps())
            return
        like = os.fstat(self._plants)
        ids = like.st_size * MERGE_AT // (first[-1][1] + 1 - first[0][1])
        with Draft(self._path, like, ids, BUILD_CACHE_KIB, self._system) as draft:
            for stamp in self._stamps():
                draft.absorb(self._generations[stamp])
            draft.extend(chain(first, records), repeat)
            sync()
            end = os.fstat(self._plants).st_size
            self._install([draft.finish(self._plants, end)])

    def enter_records(self, records: Iterable[tuple[int, int]], repeat: Repeat) -> None:
        """Enter the records from ``end`` on; if this raises, none is entered."""
        new: dict[int, int] = {}
        for id, offset in records:
            first = self._recent.get(id)
            if first is None:
                first = new.setdefault(id, offset)
            if first != offset:
                repeat(first, offset)
        for id, first in self._find_old(list(new)).items():
            repeat(first, new.pop(id))
        self._recent.update(new)

    def _install(self, stamps: list[Stamp]) -> None:
        """Write the manifest for these generations; REQUIRES: the file is synced.

        A manifest that is not believed is replaced by a new file. Processes that have
        the old one open see that it no longer has a name.
        """
        status = os.fstat(self._plants)
        new = generation_path(self._path, f'{secrets.token_hex(8)}.new')
        fresh = not self._head
        if fresh:
            self._drop_manifest()
            self._fd = new_file(new, status, self._system)
        try:
            self.seal()
            self.synced = status.st_size
            self._pwrite(_sector(str(self.synced)), 2 * SECTOR)
            if fresh or stamps != self._stamps():
                self._name(stamps)
            if fresh:
                self._system.rename(new, self._path)
                # A lost manifest could not tell what was synced.
                sync_directory(self._path, self._system)
        except BaseException:
            if fresh:
                with suppress(OSError):
                    self._system.unlink(new)
            raise
        self.end = status.st_size
        self._use(stamps)
        self._sweep()

    def _name(self, stamps: list[Stamp]) -> None:
        """Write the names of these generations into the manifest, durably."""
        self._head = _sector(json.dumps([self._identity, *stamps]))
        self._pwrite(self._head, 0)
        self._system.fsync(self._fd)

    # ---- use

    def refresh(self, status: os.stat_result) -> bool:
        """Read the changes of other processes; call it after taking the lock.

        Returns:
            Whether the plant file has its full size; false if it was cut short.
        """
        # A process that removes or replaces it cannot tell the others.
        if not os.fstat(self._fd).st_nlink:
            raise IndexDamaged('it was removed')
        head, seal, synced = self._read()
        try:
            size = self._check_seal(seal, status)
            self._sealed = size if size == status.st_size else UNKNOWN
            if size != self.end:  # what follows may be damaged
                self.synced = max(self.synced, int(_open_sector(synced)))
            if head != self._head:
                self._use(json.loads(_open_sector(head))[1:])
                self._head = head
        except (ValueError, TypeError) as ex:
            raise IndexDamaged('its manifest is damaged') from ex
        return status.st_size >= max(size, self.end)

    def find(self, ids: Sequence[int]) -> dict[int, int]:
        """Return the offsets of those ids that are in the file."""
        recent = self._recent
        found = {id: recent[id] for id in ids if id in recent}
        if len(found) < len(ids):
            found.update(self._find_old([id for id in ids if id not in found]))
        return found

    def _find_old(self, ids: Sequence[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for generation in self._generations.values():
            found.update(generation.find(ids))
        return found

    def enter(self, offsets: dict[int, int], end: int) -> None:
        """Enter the ids of an append, which ends at an offset."""
        if end != self._sealed:  # no other process has written this seal
            self.seal()
        self._recent.update(offsets)
        self.end = end

    def seal(self) -> None:
        """Write the seal of the plant file as it is now, after a change of ours."""
        status = os.fstat(self._plants)
        tail = tail_of(self._plants, status.st_size)
        text = f'{status.st_size} {status.st_mtime_ns} {tail}'
        self._pwrite(_sector(text), SECTOR)

    def note_synced(self, end: int) -> None:
        """Note that a sync has covered everything up to an end; it needs no lock.

        Of two processes the slower one may write a lower end, which is true, too.
        """
        with self._guard, suppress(OSError):
            if self._fd >= 0 and end > self.synced:
                self._pwrite(_sector(str(end)), 2 * SECTOR)
                self.synced = end

    def close(self) -> None:
        """Close the files; it needs no lock."""
        self._drop_manifest()
        while self._generations:
            self._generations.popitem()[1].close()

    def abandon(self) -> None:
        """Close the manifest in a forked child, which must take no lock.

        A thread of the parent may have held it at the fork, and it stays held: our own
        lock, or one of SQLite. So connections are not closed, also not as garbage.
        """
        if self._fd >= 0:
            os.close(self._fd)
        _inherited.append(self._generations)

    # ---- merging

    def wants_merge(self) -> bool:
        """Whether there are so many recent ids that they should be merged."""
        return len(self._recent) >= MERGE_AT or self.end - self._start() >= MERGE_BYTES

    def is_behind(self) -> bool:
        """Whether recent ids have doubled since a merge began; it needs no lock."""
        return len(self._recent) >= 2 * MERGE_AT

    def begin_merge(self) -> Merge:
        """Return the plan of a merge."""
        kept = self._stamps()
        absorbed: list[Stamp] = []
        while kept:
            end = kept[-1].end
            start = kept[-2].end if len(kept) > 1 else 0
            if len(kept) < GENERATIONS and (
                not absorbed or end - start >= FACTOR * (self.end - end)
            ):
                break
            absorbed.insert(0, kept.pop())
        ids = sum(stamp.size for stamp in absorbed) // ID_BYTES
        recent = self._recent.copy()
        return Merge(kept, absorbed, recent, self.end, len(recent) + ids)

    def write_merged(self, merge: Merge, draft: Draft) -> Stamp:
        """Write a generation; it needs no lock. REQUIRES: the file is synced."""
        for stamp in merge.absorbed:
            with closing(Generation(self._path, stamp)) as generation:
                draft.absorb(generation)
        draft.extend(merge.recent.items(), lambda *offsets: None)
        return draft.finish(self._plants, merge.end)

    def end_merge(self, merge: Merge, stamp: Stamp) -> None:
        """Replace the absorbed generations by the new one."""
        if self._stamps() != [*merge.kept, *merge.absorbed]:
            raise IndexDamaged('another process has merged meanwhile')
        stamps = [*merge.kept, stamp]
        self._name(stamps)
        self._use(stamps)
        self._sweep()

    # ---- the manifest

    def _read(self) -> tuple[bytes, bytes, bytes]:
        data = os.pread(self._fd, 3 * SECTOR, 0)
        return data[:SECTOR], data[SECTOR : 2 * SECTOR], data[2 * SECTOR :]

    def _pwrite(self, data: bytes, offset: int) -> None:
        write(self._fd, data, offset, self._system)

    def _drop_manifest(self) -> None:
        with self._guard:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _sweep(self) -> None:
        """Remove the generations that are neither in use nor being written."""
        used = {stamp.name for stamp in self._generations}
        prefix = f'{self._path.name}-'
        for name in os.listdir(self._path.parent):
            if not name.startswith(prefix) or name.removeprefix(prefix) in used:
                continue
            path = self._path.with_name(name)
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if try_flock(fd):
                        self._system.unlink(path)
                finally:
                    os.close(fd)


def read_synced(path: Path, status: os.stat_result) -> int:
    """Return what a manifest says was synced of a plant file, or ``UNKNOWN``."""
    try:
        data = path.read_bytes()
        identity = json.loads(_open_sector(data[:SECTOR]))[0]
        is_same = identity == [status.st_dev, status.st_ino]
        return int(_open_sector(data[2 * SECTOR :])) if is_same else UNKNOWN
    except (IndexDamaged, OSError, ValueError, TypeError):
        return UNKNOWN


def index_path(path: Path) -> Path:
    """Return the path of the manifest of a plant file."""
    return path.with_name(f'{path.name}.index')


def generation_path(base: Path, name: str) -> Path:
    """Return the path of a generation."""
    return base.with_name(f'{base.name}-{name}')


def new_file(path: Path, like: os.stat_result, system: Any = os) -> int:
    """Make a file with the mode and the owner of the plant file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd: int = system.open(path, flags, 0o600)
    with suppress(PermissionError):  # only root may give a file away
        os.fchown(fd, like.st_uid, like.st_gid)
    os.fchmod(fd, like.st_mode & 0o666)
    return fd


def write(fd: int, data: bytes, offset: int, system: Any = os) -> None:
    """Write all bytes, though the kernel may write them in pieces."""
    written = 0
    while written < len(data):
        count = system.pwrite(fd, data[written:], offset + written)
        if not count:
            raise OSError(errno.EIO, 'nothing could be written')
        written += count


def sync_directory(path: Path, system: Any = os) -> None:
    """Make a new name in a directory durable: a sync of the file does not cover it."""
    fd = system.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(fd)
    finally:
        os.close(fd)


def _sector(text: str) -> bytes:
    # A whole sector, so that the manifest never grows: after a crash a file may be as
    # short as before, and a number could be cut off.
    return f'{zlib.crc32(text.encode()):08x} {text}\n'.encode().ljust(SECTOR, b'\0')


def _open_sector(data: bytes) -> str:
    """Return the text of a sector, or raise ``IndexDamaged``."""
    crc, _, text = data.partition(b'\n')[0].partition(b' ')
    if crc != b'%08x' % zlib.crc32(text):
        raise IndexDamaged('its manifest is damaged')
    return text.decode()
