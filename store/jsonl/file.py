"""The life of a plant file: open, append, sync, detect changes by others, close.

``record.py`` says what a line is, ``index.py`` how an id is found, ``recovery.py`` what
a crash leaves, and ``store/group_commit.py`` how plants that wait together share one
write and one sync. Three facts carry the store:

* The *lock* is an ``flock`` on the plant file itself. The kernel releases it when its
  owner dies. Only its holder writes the file. It belongs to an inode, so its holder
  first checks that the path still names that inode.
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
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from store.base import Create, Plant
from store.errors import IdTaken, StoreClosed, StoreCorrupt, StoreUnavailable
from store.group_commit import SLOW_SYNCS_IN_FLIGHT, Entry, GroupCommit, outcomes
from store.jsonl import record, recovery
from store.jsonl.disk import CHUNK, open_file, open_or_make, unavailable, write
from store.jsonl.index import Index
from store.jsonl.lock import Call, FileLock
from store.jsonl.synced import Synced
from store.jsonl.table import IndexDamaged
from store.scheduler import THREADS, Scheduler

log = logging.getLogger(__name__)

# Seconds from an add to the flush of its id. The stretch behind the mark must be short:
# there damage by a person cannot always be told from what a crash leaves.
FLUSH_WITHIN = 1.0
CLOSE_WITHIN = 2.0  # seconds that close() waits for the lock, and for each sync
# Bytes of other processes that are read in the event loop of a server. More are read in
# scheduler.call().
CATCH_UP_BYTES = 128 * 1024
SYNC_FAILED = 'a sync failed: the server must be reloaded'
REPLACED = (
    'the file was replaced by another: put the old one back, or reload the server'
)


class PlantFile:
    """A plant file that is open in this process.

    Args:
        pinned: The status of the file that it must be, or ``None`` for any file.
        observe: Called after each sync.

    The other arguments are those of ``JSONLinesStore``.
    """

    def __init__(
        self,
        path: Path,
        create: Create,
        *,
        pinned: os.stat_result | None,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
    ) -> None:
        self._path = path
        self._call = scheduler.call
        self._observe = observe
        self._failed_sync: OSError | None = None
        self._failed_write = 0  # the length of the latest write, if it failed
        self._synced_end = 0
        self._messages: list[tuple[int, str]] = []  # logged without the lock
        self._commit = GroupCommit(
            self._append, self._sync, scheduler=scheduler, observe=self._report_sync
        )
        with unavailable(path), ExitStack() as opened:
            self._fd = open_or_make(path, create)
            opened.callback(os.close, self._fd)
            self._status = os.fstat(self._fd)
            if pinned and not os.path.samestat(pinned, self._status):
                raise self._refusal(REPLACED)
            recovery.check_ours(path, self._fd)  # before a file is made beside it
            self._lock = FileLock(path, self._open_again())
            opened.callback(self._lock.close)
            # NOTE: the kernel reports a failed write-back once to each open file, at
            # its next sync. Syncs that overlap on one descriptor would share that one
            # report: the first would fail, and the second lie. So each sync has its own
            # descriptor. All are opened now: one that is opened later learns nothing of
            # an earlier failure.
            self._sync_fds = SimpleQueue[int]()
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                fd = self._open_again()
                opened.callback(os.close, fd)
                self._sync_fds.put(fd)
            with self._locked():
                self._check_file()
                self._notes = Synced(path, self._fd)
                opened.callback(self._notes.close)
                self._index = self._open_index(crashed=True)
            with suppress(OSError):
                self._index.flush()  # it says that the index is in use
            self._closing = threading.Event()
            self._flusher = threading.Thread(target=self._flush, daemon=True)
            self._flusher.start()
            self._opened = opened.pop_all()

    def _open_again(self) -> int:
        """Return another descriptor of the file, which may be replaced meanwhile."""
        fd = open_file(self._path)
        if not os.path.samestat(os.fstat(fd), self._status):
            os.close(fd)
            raise self._refusal(REPLACED)
        return fd

    def add(self, plant: Plant) -> bool:
        line = record.encode(plant)
        return self._commit.submit((plant, line), len(line))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        batch = [Entry((plant, record.encode(plant)), 0) for plant in plants]
        if end := self._append(batch):
            self._sync(end)
            self._note_synced()
        self._index.flush_if_full()
        return outcomes(batch)

    def ping(self) -> None:
        with unavailable(self._path), self._locked():
            end, _ = self._catch_up()
            if not os.fstatvfs(self._fd).f_bavail:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._failed_write:
                # Only a write tells whether a write would fail (a quota, a limit, the
                # disk). A crash may leave its zeros: without a line feed a torn tail.
                self._write(bytes(self._failed_write), end)
                os.ftruncate(self._fd, end)

    def close(self) -> None:
        self._closing.set()
        self._flusher.join()
        # On timeout a sync, or the holder of the lock, is stuck. Leave the files open:
        # the end of the process closes them.
        with suppress(StoreUnavailable, Empty):
            with self._locked(CLOSE_WITHIN):
                self._lock.closed = True  # nobody takes it after this
                with suppress(OSError, StoreUnavailable, StoreCorrupt, IndexDamaged):
                    end, _ = self._catch_up()
                    if end > self._index.synced:
                        os.fsync(self._fd)
                        self._notes.note_end(end)
                    self._index.synced = end
                    self._index.close()
                    self._index.flush(is_last=True)
            # A sync has taken one of these: with all of them taken no sync runs.
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                self._sync_fds.get(timeout=CLOSE_WITHIN)
            self._sync_fds.put(-1)
            self._index.close()
            self._opened.close()

    def abandon(self) -> None:
        self._opened.close()

    # The life of a plant: buffered, written, durable, acknowledged.

    def _append(self, batch: Sequence[Entry[tuple[Plant, bytes]]]) -> int:
        """Write the new plants of a batch; return the end to sync, or 0."""
        ids = {entry.item[0].id for entry in batch}
        with unavailable(self._path), self._locked(call=self._call):
            end, stored = self._catch_up(ids, self._call)
            # Buffered. A repeat is an acknowledgement too: the first write of the
            # plant, perhaps by another process, may not be synced yet. So it waits for
            # a sync.
            offsets: dict[int, int] = {}
            buffer = bytearray()
            needs_sync = False
            for entry in batch:
                plant, line = entry.item
                entry.new = plant.id not in stored
                first = stored.setdefault(plant.id, plant)
                entry.error = None if first == plant else IdTaken(plant.id)
                needs_sync |= entry.error is None
                if entry.new:
                    offsets[plant.id] = end + len(buffer)
                    buffer += line
            if buffer:
                data = bytes(buffer)
                self._write(data, end)
                # Written. A process that dies from here on leaves lines that the next
                # holder of the lock reads.
                self._index.enter(offsets, data)
        return end + len(buffer) if needs_sync else 0

    def _write(self, data: bytes, end: int) -> None:
        try:
            write(self._fd, data, end)
        except BaseException:
            self._failed_write = len(data)
            self._notes.note_failure(len(data))
            # Back to the last good end. If that fails too, the next holder of the lock
            # reads or cuts the rest.
            with suppress(OSError):
                if os.fstat(self._fd).st_size > end:
                    os.ftruncate(self._fd, end)
                    os.fdatasync(self._fd)  # see cut_tail
            raise
        if self._failed_write:
            self._failed_write = 0
            self._notes.note_failure(0)

    def _sync(self, end: int) -> None:
        fd = self._sync_fds.get()
        try:
            if fd < 0:
                raise StoreClosed
            os.fdatasync(fd)
        except OSError as ex:
            # Refuse plants from now on: the kernel may have dropped unsynced pages.
            self._failed_sync = ex
            log.critical(
                '%s: a sync failed (%s): what it covered may be lost, and no plant is '
                'taken until the store is opened again (reload the server)',
                self._path,
                ex.strerror,
            )
        finally:
            self._sync_fds.put(fd)
        # Durable, and acknowledged when the caller returns, unless another sync has
        # failed meanwhile: it may have covered the same bytes.
        if self._failed_sync is not None:
            raise self._refusal(SYNC_FAILED) from self._failed_sync
        self._synced_end = max(self._synced_end, end)

    def _report_sync(self, plants: int, seconds: float) -> None:
        self._note_synced()
        self._observe(plants, seconds)

    def _note_synced(self) -> None:
        """Note the end of the latest sync, before plants are acknowledged.

        Not in the thread of the sync, which would wait for the GIL once more.
        """
        end = self._synced_end
        if end > self._index.synced:
            self._index.synced = end
            self._notes.note_end(end)

    def _flush(self) -> None:
        """Flush the index within a second after an add, in a thread of its own."""
        failure = ''
        while not self._closing.wait(FLUSH_WITHIN):
            try:
                if self._index.flush():
                    failure = ''
            except OSError as ex:
                if str(ex) != failure:  # once, though the disk stays full
                    failure = str(ex)
                    log.info('%s: the index is not flushed: %s', self._path, ex)

    def _refusal(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(reason, store=str(self._path))

    @contextmanager
    def _locked(
        self, within: float | None = None, call: Call = THREADS.call
    ) -> Iterator[None]:
        """Hold the lock, and log only after it: a log may block."""
        try:
            with self._lock.held(within, call):
                yield
        finally:
            messages, self._messages = self._messages, []
            for level, text in messages:
                log.log(level, text)

    # What follows REQUIRES the lock.

    def _check_file(self) -> os.stat_result:
        """Return the status of the path, which must still name the opened file."""
        if self._failed_sync is not None:
            raise self._refusal(SYNC_FAILED)
        status = os.stat(self._path)
        if not os.path.samestat(status, self._status):
            raise self._refusal(REPLACED)
        return status

    def _catch_up(
        self, ids: Collection[int] = (), call: Call = THREADS.call
    ) -> tuple[int, dict[int, Plant]]:
        """Return the end of the file, and the plants in it that have these ids.

        Other processes may have appended, or died in the middle of a line. So this runs
        before each append, not only when a store opens. ``call`` calls a function that
        takes a while.
        """
        for rebuild in False, True:
            try:
                return self._find(ids, call)
            except IndexDamaged as ex:
                text = f'{self._path}: the index is opened again: {ex}'
                self._messages.append((logging.WARNING, text))
                self._index.close()
                # Opening it again helps if it was replaced, not if it is wrong.
                self._index = call(partial(self._open_index, rebuild=rebuild))
        return self._find(ids, call)

    def _find(self, ids: Collection[int], call: Call) -> tuple[int, dict[int, Plant]]:
        size = self._check_file().st_size
        index = self._index
        synced, failed = self._notes.read()
        self._failed_write = max(self._failed_write, failed)
        recovery.check_length(self._path, self._fd, size, max(synced, index.end))
        if not index.is_at_end():
            raise IndexDamaged('the plant file was changed in place')
        is_far = size - index.end > CATCH_UP_BYTES
        offsets: dict[int, int] = {}
        if is_far or size == index.end:
            offsets = index.find(ids)  # perhaps another process has entered more
        if size != index.end:
            learn = partial(self._learn, index, ids)
            offsets |= call(learn) if is_far else learn()
        plants: dict[int, Plant] = {}
        for id, offset in offsets.items():
            plant = None
            with suppress(OSError):
                plant = recovery.line_at(self._fd, offset).plant
            if plant is None or plant.id != id:
                # The index or the file is damaged: building the index again tells.
                raise IndexDamaged('an entry is not of this file')
            plants[id] = plant
        return index.end, plants

    def _open_index(self, *, crashed: bool = False, rebuild: bool = False) -> Index:
        """Return the index, which knows all ids of the file; the file is synced.

        Args:
            crashed: Whether the machine may have crashed since the latest sync.
            rebuild: Whether the present table is wrong.
        """
        index = Index(self._path, self._fd, new=rebuild)
        try:
            size = os.fstat(self._fd).st_size
            recovery.check_length(self._path, self._fd, size, index.synced)
            if index.reason:
                index.build()
                if size:
                    text = f'{self._path}: building the index: {index.reason}'
                    self._messages.append((logging.INFO, text))
            self._learn(index, crashed=crashed)
            if index.synced < index.end:
                # Plants of another process may not be on the disk, and this process
                # would acknowledge their repeats.
                start = max(0, index.synced)
                while data := os.pread(self._fd, CHUNK, start):
                    start += os.pwrite(self._fd, data, start)
                # NOTE: not fdatasync, which leaves out the mtime: the index has it.
                os.fsync(self._fd)
                index.synced = index.end
                self._notes.note_end(index.end)
            if index.reason:
                index.install(index.end)
        except BaseException as ex:
            index.close()
            if rebuild or not isinstance(ex, IndexDamaged):
                raise
            return self._open_index(crashed=crashed, rebuild=True)
        return index

    def _learn(
        self, index: Index, ids: Collection[int] = (), *, crashed: bool = False
    ) -> dict[int, int]:
        """Enter the lines that an index does not know, and mend the end of the file.

        Returns:
            The offsets of those ids that are known then.
        """
        end = os.fstat(self._fd).st_size
        found, torn = recovery.learn(
            self._path, self._fd, index, end, ids, crashed=crashed
        )
        if torn is not None:
            side = recovery.cut_tail(self._path, self._fd, torn.offset)
            text = (
                f'{self._path}: removed {end - torn.offset} bytes of an unfinished '
                f'write at byte {torn.offset} ({torn.reason}); a copy is in {side.name}'
            )
            self._messages.append((logging.WARNING, text))
        elif end and os.pread(self._fd, 1, end - 1) != b'\n':
            self._write(b'\n', end)  # the last line is a record without its line feed
        index.know(os.fstat(self._fd).st_size)
        return found
