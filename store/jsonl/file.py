"""The life of a plant file: open, append, sync, detect changes by others, close.

``record.py`` says what a line is, ``index.py`` how an id is found, ``recovery.py`` what
a crash leaves, and ``store/group_commit.py`` how plants that wait together share one
write and one sync. Three facts carry the store:

* The *lock* is an ``flock`` on the plant file itself. The kernel releases it when its
  owner dies. Only its holder writes the file and the index. It belongs to an inode, so
  its holder first checks that the path still names that inode.
* The *end* is the size of the file up to which this process knows its ids. Bytes behind
  it were written by another process. They are read under the lock, before an append.
* A plant is *acknowledged* after a sync that began after the plant was written.

**After a failed sync** the kernel may hold pages as clean that are not on the disk:
reading shows them, and another sync skips them. So a store that sees a sync fail
refuses plants until it is opened again. An open writes all bytes again that are not
known to have been synced: a written page is dirty, so the next sync tells the truth
about it. Other processes need not be told. The kernel reports a failed write-back once
to each descriptor that was open then, at its next sync, and a process that opens the
file later writes the bytes again first.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from store.base import Create, Plant
from store.errors import (
    IdTaken,
    StoreClosed,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
)
from store.group_commit import SLOW_SYNCS_IN_FLIGHT, Entry, GroupCommit, outcomes
from store.jsonl import record, recovery
from store.jsonl.index import (
    Draft,
    Index,
    IndexDamaged,
    index_path,
    sync_directory,
    write,
)
from store.jsonl.lock import FileLock, try_flock
from store.lazy import LazyStore
from store.scheduler import THREADS, Scheduler

log = logging.getLogger(__name__)

Batch = Sequence[Entry[tuple[Plant, bytes]]]

CLOSE_WITHIN = 2.0  # seconds that close() waits for the lock, and for each sync
MERGE_EVERY = 0.2  # seconds between two attempts, since another process may be merging
# Seconds. A merge works while requests wait for a sync: it shares the interpreter with
# them. It waits so long for a sync, and not at all if recent ids come too quickly.
MERGE_PAUSE = 0.01
# Bytes of other processes that are entered into the open index. If there are more, the
# index is opened again, with scheduler.call(), which does not block a server.
CATCH_UP_BYTES = 128 * 1024


class JSONLinesStore(LazyStore['PlantFile']):
    """Keep plants in a file of JSON lines; durable when the disk says so.

    An add returns after ``fdatasync``. A new file has mode 0600. A line that is in the
    file twice is accepted, and yielded twice.

    Args:
        path: The plant file. The index is beside it, with ``.index`` added.
        create: Whether a missing file is made: ``always``, now; ``never``; or
            ``first``, at the first use and only if its index is missing too. A new file
            knows no earlier id. Except with ``first``, the store remembers which file
            is there now, and refuses another file in its place, also in processes
            forked later.
        scheduler: How the callers wait.
        system: The ``os`` module, or system calls that a test makes fail.

    Raises:
        StoreUnavailable: The file cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: Create = 'first',
        scheduler: Scheduler = THREADS,
        system: Any = os,
    ) -> None:
        super().__init__(scheduler=scheduler)
        # Resolved, so that a file has one index, also if links give it several names.
        # NOTE: not Path.resolve(), which raises RuntimeError where links make a loop.
        self.path = Path(os.path.realpath(path))
        self._create = create
        self._system = system
        self._pinned: tuple[int, int] | None = None
        # In memory that forked processes share, since any of them may be asked whether
        # an add would work.
        self._failed_write = memoryview(mmap.mmap(-1, 8)).cast('Q')
        if create == 'always':
            with _unavailable(self.path):
                os.close(open_file(self.path, os.O_CREAT, system))
        if create != 'first':
            with suppress(OSError):
                status = self.path.stat()
                self._pinned = status.st_dev, status.st_ino

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        return recovery.read_plants(self.path)

    def check_opening(self) -> None:
        """Return if the file could be opened or made; its lines are not read."""
        self._check_open()
        with _unavailable(self.path):
            if self.path.exists():
                os.close(self._system.open(self.path, os.O_RDWR | os.O_CLOEXEC))
            # The index is made in this directory.
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                reason = 'its directory does not exist, or cannot be written to'
                raise StoreUnavailable(reason, store=str(self.path))

    def _open_backend(self) -> PlantFile:
        return PlantFile(
            self.path,
            'never' if self._pinned else self._create,
            pinned=self._pinned,
            failed_write=self._failed_write,
            scheduler=self._scheduler,
            observe=self._report_sync,
            system=self._system,
        )


class PlantFile:
    """A plant file that is open in this process.

    Args:
        pinned: Device and inode that it must have, or ``None``.
        failed_write: The length of the latest write, if it failed, or 0; only the
            holder of the lock changes it.
        observe: Called after each sync.

    The other arguments are those of ``JSONLinesStore``.
    """

    def __init__(
        self,
        path: Path,
        create: Create,
        *,
        pinned: tuple[int, int] | None,
        failed_write: memoryview,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
        system: Any,
    ) -> None:
        self._path = path
        self._system = system
        self._call = scheduler.call
        self._observe = observe
        self._failed_sync: OSError | None = None
        self._failed_write = failed_write
        self._synced: tuple[Index, int] | None = None  # the end of the latest sync
        self._merging: threading.Thread | None = None
        self._merge_at = 0.0
        self._sync_began = threading.Event()
        self._commit = GroupCommit(
            self._append,
            self._sync,
            scheduler=scheduler,
            observe=self._report_sync,
        )
        with _unavailable(path), ExitStack() as opened:
            self._fd = self._open(create)
            opened.callback(os.close, self._fd)
            status = os.fstat(self._fd)
            self._identity = status.st_dev, status.st_ino
            if pinned not in (None, self._identity):
                raise self._replaced()
            self._lock = FileLock(self._fd, path)
            # NOTE: the kernel reports a failed write-back once to each open file, at
            # its next sync. Syncs that overlap on one descriptor would share that one
            # report: the first would fail, and the second lie. So each sync has its own
            # descriptor. All are opened now: one that is opened later learns nothing of
            # an earlier failure.
            self._sync_fds = SimpleQueue[int]()
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                fd = self._system.open(path, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                if not os.path.sameopenfile(fd, self._fd):
                    raise self._replaced()
                self._sync_fds.put(fd)
            with self._lock.held():
                self._check_file()
                self._index = self._open_index(crashed=True)
            self._opened = opened.pop_all()

    def add(self, plant: Plant) -> bool:
        line = record.encode(plant)
        return self._commit.submit((plant, line), len(line))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        batch = [Entry((plant, record.encode(plant)), 0) for plant in plants]
        if written := self._append(batch):
            self._sync(written)
            self._note_synced()
        return outcomes(batch)

    def ping(self) -> None:
        with _unavailable(self._path), self._lock.held():
            end = self._catch_up(THREADS.call)
            if not os.fstatvfs(self._fd).f_bavail:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._failed_write[0]:
                # Only a write tells whether a write would fail (a quota, a limit, the
                # disk). A crash may leave its zeros: without a line feed a torn tail.
                self._write(bytes(self._failed_write[0]), end)
                self._system.ftruncate(self._fd, end)
                self._index.seal()

    def close(self) -> None:
        # On timeout a sync, or the holder of the lock, is stuck. Leave the files open:
        # the end of the process closes them.
        with suppress(StoreUnavailable, Empty):
            with self._lock.held(CLOSE_WITHIN):
                self._lock.closed = True  # nobody takes it after this
            if self._merging is not None:
                self._merging.join()
            # A sync has taken one of these: with all of them taken no sync runs.
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                self._sync_fds.get(timeout=CLOSE_WITHIN)
            self._sync_fds.put(-1)
            self._index.close()
            self._opened.close()

    def abandon(self) -> None:
        self._index.abandon()
        self._opened.close()

    def _open(self, create: Create) -> int:
        """Open the file; make it, durably, if it is missing and may be made."""
        flags = 0
        index = index_path(self._path)
        if create == 'always' or (create == 'first' and not index.exists()):
            flags |= os.O_CREAT
        try:
            return open_file(self._path, flags, self._system)
        except FileNotFoundError as ex:
            if flags & os.O_CREAT:
                raise self._unavailable('its directory does not exist') from ex
            remedy = (
                'reload the server' if create == 'never' else f'remove {index.name}'
            )
            raise self._unavailable(
                f'the file is gone: put it back, or {remedy} to start with an empty one'
            ) from ex

    # The life of a plant: buffered, written, durable, acknowledged.

    def _append(self, batch: Batch) -> tuple[Index, int] | None:
        """Write the new plants of a batch; return the index and the end to sync."""

        def sleep(seconds: float) -> None:
            self._call(partial(time.sleep, seconds))

        with _unavailable(self._path), self._lock.held(sleep=sleep):
            end = self._catch_up(self._call)
            try:
                return self._append_locked(batch, end)
            except IndexDamaged as ex:
                end = self._reopen(self._call, ex)
                return self._append_locked(batch, end)

    def _append_locked(self, batch: Batch, end: int) -> tuple[Index, int] | None:
        # Buffered. A repeat is an acknowledgement too: the first write of the plant,
        # perhaps by another process, may not be synced yet. So it waits for a sync.
        stored = self._find({entry.item[0].id for entry in batch})
        offsets: dict[int, int] = {}
        lines: list[bytes] = []
        position = end
        needs_sync = False
        for entry in batch:
            plant, line = entry.item
            entry.new = plant.id not in stored
            first = stored.setdefault(plant.id, plant)
            entry.error = None if first == plant else IdTaken(plant.id)
            needs_sync |= entry.error is None
            if entry.new:
                offsets[plant.id] = position
                lines.append(line)
                position += len(line)
        if lines:
            self._write(b''.join(lines), end)
            # Written. A process that dies from here on, before the index knows the
            # end, leaves a file that is longer than the index says: see _catch_up.
            self._index.enter(offsets, position)
            if self._index.wants_merge():
                self._start_merge()
        return (self._index, position) if needs_sync else None

    def _write(self, data: bytes, end: int) -> None:
        self._failed_write[0] = len(data)
        try:
            write(self._fd, data, end, self._system)
        except BaseException:
            # Back to the last good end. If that fails too, the file is longer than the
            # index says, and the next holder of the lock reads or cuts the rest.
            with suppress(OSError):
                if os.fstat(self._fd).st_size > end:
                    self._system.ftruncate(self._fd, end)
                    self._system.fdatasync(self._fd)  # see cut_tail
                    self._index.seal()
            raise
        self._failed_write[0] = 0

    def _sync(self, written: tuple[Index, int] | None) -> None:
        assert written is not None
        index, end = written
        fd = self._sync_fds.get()
        try:
            if fd < 0:
                raise StoreClosed
            self._sync_began.set()
            self._system.fdatasync(fd)
            self._synced = index, end
        except OSError as ex:
            # Refuse plants from now on: the kernel may have dropped unsynced pages.
            self._failed_sync = ex
            log.critical(
                '%s: a sync failed (%s): what it covered may be lost, and no plant is '
                'taken until the store is opened again (reload the server)',
                self._path,
                ex.strerror,
            )
            raise self._latched() from ex
        finally:
            self._sync_fds.put(fd)
        # Durable, and acknowledged when the caller returns, unless another sync has
        # failed meanwhile: it may have covered the same bytes.
        if self._failed_sync is not None:
            raise self._latched()

    def _report_sync(self, plants: int, seconds: float) -> None:
        self._note_synced()
        self._observe(plants, seconds)

    def _note_synced(self) -> None:
        """Note the latest sync in the index.

        Not in the thread of the sync, which would wait for the GIL once more.
        """
        if self._synced is not None:
            index, end = self._synced
            index.note_synced(end)

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(reason, store=str(self._path))

    def _latched(self) -> StoreUnavailable:
        return self._unavailable('a sync failed: the server must be reloaded')

    def _replaced(self) -> StoreUnavailable:
        return self._unavailable(
            'the file was replaced by another: put the old one back, or reload the '
            'server'
        )

    # What follows REQUIRES the lock.

    def _check_file(self) -> os.stat_result:
        """Return the status of the path, which must still name the opened file."""
        if self._failed_sync is not None:
            raise self._latched()
        status = os.stat(self._path)
        if (status.st_dev, status.st_ino) != self._identity:
            raise self._replaced()
        return status

    def _catch_up(self, call: Callable[[Callable[[], int]], int]) -> int:
        """Return the end of the file, with the index up to it.

        Other processes may have appended, or died in the middle of a line. So this runs
        before each append, not only when a store opens. ``call`` calls a function that
        takes a while.
        """
        status = self._check_file()
        try:
            if not self._index.refresh(status):
                raise self._unavailable(
                    'the file was cut short: the server must be reloaded'
                )
            more = status.st_size - self._index.end
            if not more:
                return status.st_size
            if more <= CATCH_UP_BYTES:
                records = self._records(self._index, crashed=False)
                self._index.enter_records(records, self._check_repeat)
                end = os.fstat(self._fd).st_size
                self._index.enter({}, end)
                return end
        except IndexDamaged as ex:
            return self._reopen(call, ex)
        return self._reopen(call, None)

    def _reopen(
        self, call: Callable[[Callable[[], int]], int], damage: IndexDamaged | None
    ) -> int:
        """Open the index again, because it is damaged or far behind the file."""
        if damage is not None:
            log.warning('%s: the index is not used any more: %s', self._path, damage)

        def reopen() -> int:
            old, self._index = self._index, self._open_index(crashed=False)
            old.close()
            return self._index.end

        return call(reopen)

    def _open_index(self, *, crashed: bool) -> Index:
        """Return the index, which knows all ids of the file; the file is synced.

        Args:
            crashed: Whether the machine may have crashed since the latest sync.
        """
        index = Index(index_path(self._path), self._fd, self._system)
        try:
            reason = index.load()
            if reason and os.fstat(self._fd).st_size:
                log.info('%s: building the index: %s', self._path, reason)
            index.catch_up(
                self._records(index, crashed=crashed),
                self._check_repeat,
                lambda: self._write_again(max(0, index.synced)),
            )
        except BaseException:
            index.close()
            raise
        return index

    def _write_again(self, start: int) -> None:
        """Make the file durable, also if earlier syncs have failed.

        Plants of another process may not be on the disk, and this process would
        acknowledge their repeats. The top of this file says why it writes them again.
        """
        if start < os.fstat(self._fd).st_size:
            while data := os.pread(self._fd, recovery.CHUNK, start):
                start += self._system.pwrite(self._fd, data, start)
        # NOTE: not fdatasync, which leaves out the mtime: the index remembers it.
        self._system.fsync(self._fd)

    def _records(self, index: Index, *, crashed: bool) -> Iterator[tuple[int, int]]:
        """Yield ids and offsets that an index does not know; cut off a torn tail."""
        end = os.fstat(self._fd).st_size
        try:
            yield from recovery.scan_ids(
                self._path, self._fd, index.end, end, index.synced, crashed=crashed
            )
        except recovery.TornTail as torn:
            side = recovery.cut_tail(self._path, self._fd, torn.offset, self._system)
            log.warning(
                '%s: a torn tail of %d bytes at byte %d, which was never '
                'acknowledged (%s), is cut off and kept in %s',
                self._path,
                end - torn.offset,
                torn.offset,
                torn.reason,
                side.name,
            )

    def _check_repeat(self, first: int, again: int) -> None:
        """Accept a plant that is in the file twice, but not two with one id."""
        plant = self._read(first)
        other = self._read(again)
        if plant.id != other.id:
            raise IndexDamaged('an entry is not of this file')
        if plant != other:
            reason = f'its id is that of a different plant, {plant.id}'
            raise recovery.corrupt(self._path, self._fd, again, reason)

    def _find(self, ids: set[int]) -> dict[int, Plant]:
        """Return the plants that have these ids."""
        found = {}
        for id, offset in self._index.find(list(ids)).items():
            with suppress(StoreCorrupt, OSError):
                found[id] = self._read(offset)
            if id not in found or found[id].id != id:
                # The index or the file is damaged: building the index again tells.
                raise IndexDamaged('an entry is not of this file')
        return found

    def _read(self, offset: int) -> Plant:
        """Return the plant at an offset."""
        try:
            return record.decode(recovery.read_line(self._fd, offset))
        except record.DamagedRecord as ex:
            raise recovery.corrupt(self._path, self._fd, offset, str(ex)) from ex

    # ---- merging recent ids into a generation of the index, in a thread of its own

    def _start_merge(self) -> None:
        now = time.monotonic()
        if now < self._merge_at or (self._merging and self._merging.is_alive()):
            return
        self._merge_at = now + MERGE_EVERY
        self._merging = threading.Thread(target=self._merge, daemon=True)
        self._merging.start()

    def _merge(self) -> None:
        """Merge the recent ids; after a failure the next append tries it again."""
        path = index_path(self._path)
        try:
            fd = self._system.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_flock(fd):  # no other process is merging
                    self._merge_alone(path)
            finally:
                os.close(fd)
        except (StoreError, OSError, IndexDamaged) as ex:
            log.info('%s: the index is not merged now: %s', self._path, ex)

    def _merge_alone(self, path: Path) -> None:
        with self._lock.held():
            status = self._check_file()
            index = self._index
            index.refresh(status)
            merge = index.begin_merge() if index.wants_merge() else None
        if merge is None:
            return
        self._sync((index, merge.end))

        def pause() -> bool:
            if not index.is_behind():
                self._sync_began.clear()
                self._sync_began.wait(MERGE_PAUSE)
            return self._lock.closed

        with Draft(path, status, merge.ids, system=self._system, pause=pause) as draft:
            stamp = index.write_merged(merge, draft)
            with self._lock.held():
                index.refresh(self._check_file())
                if index is not self._index:
                    raise IndexDamaged('it was opened again meanwhile')
                index.end_merge(merge, stamp)


@contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as ex:
        raise StoreUnavailable('the file is gone', store=str(path)) from ex
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex
    except IndexDamaged as ex:  # twice in a row
        raise StoreUnavailable(f'the index: {ex}', store=str(path)) from ex


def open_file(path: Path, flags: int, system: Any) -> int:
    """Open a plant file, and return its descriptor; make it durably, with O_CREAT."""
    fd: int = system.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Also if it was there: the process that made it may have died before this.
        if not os.fstat(fd).st_size:
            sync_directory(path, system)
    except BaseException:
        os.close(fd)
        raise
    return fd
