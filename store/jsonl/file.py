"""The life of a plant file: open, append, sync, detect changes by others, close.

``record.py`` says what a line is, ``index.py`` how an id is found, ``recovery.py`` what
a crash leaves, and ``store/group_commit.py`` how plants that wait together share one
write and one sync. Three facts carry the store:

* The *lock* is an ``flock`` on the plant file itself, which the kernel releases when
  its owner dies. Only its holder writes the file, if the path still names this inode.
* The holder first *catches up*: it reads the lines that other processes have written,
  and mends the end of the file if one of them was killed.
* A plant is *acknowledged* after a sync that began after the plant was written.

Five ends of the file, from the first to the last, and when each is believed:

=======  ============================  ==========================  ===================
end      of the lines before it        who sets it                 who believes it
=======  ============================  ==========================  ===================
flushed  the ids are in the table      the flush of this process   its next flush
mark     the ids are in the table,     any flush, in one commit    each look, and each
         and the lines synced          with the ids                process that opens
synced   the lines are synced          this process, after a sync  a flush; recovery
                                       or an open
end      the ids are known             this process, when it has   the next catch-up,
                                       read or written them        which reads on
size     the lines are written, the    whoever writes              nobody: catch-up
         last one perhaps in part                                  reads these lines
=======  ============================  ==========================  ===================

**An old mark loses nothing.** After a power cut the mark may be that of the last
checkpoint. But a sync covers all lines before it, so a crash damages no byte before the
end of the last acknowledged line. Recovery needs the mark only to refuse a cut: damage
before the mark, or a shorter file, was not caused by a crash. After the mark, damage by
a person may look like damage by a crash.

**After a failed sync** the kernel may hold pages as clean that are not on the disk:
reading shows them, and another sync skips them. So a store that sees a sync fail
refuses plants until it is opened again. An open writes all bytes again that are not
known to have been synced: a written page is dirty, so the next sync tells the truth.
Other processes see the failure, too: the kernel reports a failed write-back once to
each descriptor that was open then.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from store.base import Create, Plant
from store.errors import IdTaken, StoreClosed, StoreCorrupt, StoreUnavailable
from store.group_commit import SLOW_SYNCS_IN_FLIGHT, Entry
from store.jsonl import disk, recovery
from store.jsonl.index import UNKNOWN, Index
from store.jsonl.lock import FileLock
from store.jsonl.table import IndexDamaged

log = logging.getLogger(__name__)

FLUSH_WITHIN = 1.0  # seconds from an add to the flush of its id
CLOSE_WITHIN = 2.0  # seconds that close() waits for the lock
FEW_BYTES = 128 * 1024  # of other processes; reading them costs less than a look
SYNC_FAILED = 'a sync failed: the server must be reloaded'
REPLACED = (
    'the file was replaced by another: put the old one back, or reload the server'
)


class PlantFile:
    """A plant file that is open in this process: the ``pinned`` one, if any."""

    def __init__(
        self,
        path: Path,
        create: Create,
        *,
        pinned: os.stat_result | None,
    ) -> None:
        self._path = path
        self._failed_sync: OSError | None = None
        self._failed_write = 0  # the length of the latest write, if it failed
        self._messages: list[tuple[object, ...]] = []  # logged without the lock
        with disk.unavailable(path), ExitStack() as opened:
            self._fd = disk.open_or_make(path, create)
            opened.callback(os.close, self._fd)
            self._status = os.fstat(self._fd)
            if not self._status.st_size:  # perhaps new, made by any process
                disk.sync_directory(path)
            if pinned and not os.path.samestat(pinned, self._status):
                raise self._refusal(REPLACED)
            recovery.check_ours(path, self._fd)  # before a file is made beside it
            self._lock = FileLock(path, self._open_again)
            opened.callback(self._lock.close)
            # NOTE: syncs on one descriptor would share the one report of a failed
            # write-back: the first would fail, and the second lie. So each sync has its
            # own, opened now: one that is opened later may miss an earlier failure.
            self._sync_fds = SimpleQueue[int]()
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                fd = self._open_again()
                opened.callback(os.close, fd)
                self._sync_fds.put(fd)
            self._index = Index(path, self._fd, new=True)  # _catch_up replaces it
            opened.callback(lambda: self._index.close())
            with self._locked():
                self._catch_up(crashed=True)
            with suppress(OSError):
                self._index.flush()  # notes in the table that the index is in use
            self._closing = threading.Event()
            self._flusher = threading.Thread(target=self._flush, daemon=True)
            self._flusher.start()
            self._opened = opened.pop_all()

    def _open_again(self) -> int:
        """Open the file again; raise ``StoreUnavailable`` if it was replaced."""
        fd = disk.open_file(self._path)
        if not os.path.samestat(os.fstat(fd), self._status):
            os.close(fd)
            raise self._refusal(REPLACED)
        return fd

    def ping(self) -> None:
        with disk.unavailable(self._path), self._locked():
            self._catch_up()
            # To the lock file. As long as a failed append, at its offset: the process
            # may have a limit.
            offset = self._index.end if self._failed_write else 0
            disk.try_write(self._path, self._fd, self._failed_write or 1, offset)

    def close(self) -> None:
        """Release everything, when no thread of this process uses it any more."""
        self._closing.set()
        self._flusher.join()
        with disk.unavailable(self._path), self._opened:
            # On timeout another process is stuck: the index stays as after a kill.
            with suppress(StoreUnavailable), self._locked(CLOSE_WITHIN):
                self._lock.closed = True  # nobody takes it after this
                with suppress(OSError, StoreCorrupt, IndexDamaged):
                    self._catch_up()
                    end = self._index.end
                    if end > self._index.synced:
                        disk.sync(self._fd, times=True)
                    self._index.synced = end
                    self._index.close()  # first: the flush leaves the WAL mode
                    self._index.flush(is_last=True)
            with self._lock.mutex:  # wait for the thread that holds the lock
                self._lock.closed = True
            # Each sync takes one while it runs: once this has all, no sync runs.
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                self._sync_fds.get()
            self._sync_fds.put(-1)

    def abandon(self) -> None:
        self._opened.close()

    # The life of a plant: buffered, written, durable, acknowledged.

    def append(
        self, batch: Sequence[Entry[tuple[Plant, bytes]]]
    ) -> Callable[[], None] | None:
        """Write the new plants of a batch; return the function that syncs them."""
        ids = {entry.item[0].id for entry in batch}
        with disk.unavailable(self._path), self._locked():
            stored, latest = self._catch_up(ids)
            end = self._index.end
            # Buffered.
            offsets: dict[int, int] = {}
            buffer = bytearray()
            for entry in batch:
                plant, line = entry.item
                entry.new = plant.id not in stored
                first = stored.setdefault(plant.id, plant)
                entry.error = None if first == plant else IdTaken(plant.id)
                if entry.new:
                    offsets[plant.id] = end + len(buffer)
                    buffer += line
            # A repeat acknowledges the plant that was written first, perhaps by another
            # process, and so does a refusal. Both wait until it is synced.
            if not buffer and latest < max(self._index.synced, self._index.mark):
                return None
            if buffer:
                data = bytes(buffer)
                self._write(data, end)
                # Written: the next holder of the lock reads it, also if this one dies.
                self._index.enter(offsets, data)
        return partial(self._sync, end + len(buffer))

    def _write(self, data: bytes, end: int) -> None:
        try:
            disk.write(self._fd, data, end)
        except BaseException:
            self._failed_write = len(data)
            # Cut to the last good end: the next holder of the lock would read the rest.
            with suppress(OSError):
                if os.fstat(self._fd).st_size > end:
                    os.ftruncate(self._fd, end)
                    disk.sync(self._fd)  # see cut_tail
            raise
        self._failed_write = 0

    def _sync(self, end: int) -> None:
        fd = self._sync_fds.get()
        try:
            if fd < 0:
                raise StoreClosed
            try:
                disk.sync(fd)
            except OSError as ex:
                self._failed_sync = ex
                log.critical(
                    '%s: a sync failed (%s): unsynced bytes may be lost, and no plant '
                    'is taken until the store is opened again (reload the server)',
                    self._path,
                    ex.strerror,
                )
            # Durable, and acknowledged when the caller returns; unless another sync has
            # failed meanwhile, which may have covered the same bytes.
            if self._failed_sync is not None:
                raise self._refusal(SYNC_FAILED) from self._failed_sync
            self._index.synced = max(self._index.synced, end)
            self._index.flush_if_full()
        finally:
            self._sync_fds.put(fd)  # last: close() waits for it

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
    def _locked(self, within: float = math.inf) -> Iterator[None]:
        """Hold the lock, and log after its release, since a log may block."""
        try:
            with self._lock.held(within):
                yield
        finally:
            messages, self._messages = self._messages, []
            for text, *values in messages:
                log.warning(text, *values)

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
        self, ids: Collection[int] = (), *, crashed: bool = False
    ) -> tuple[dict[int, Plant], int]:
        """Find the plants that have these ids, up to the end of the file.

        Return them by id, and the last of their offsets, or ``UNKNOWN``.

        If the index cannot be believed it is opened again, since another process may
        have replaced it, and then built. With ``crashed`` the store opens: the machine
        may have crashed before.
        """
        reopen, new = crashed, False
        while True:
            try:
                if reopen:
                    self._open_index(new=new, crashed=crashed)
                return self._find(ids)
            except IndexDamaged as ex:
                if new:
                    raise
                reopen, new = True, reopen  # build it if it was opened again
                text = '%s: the index is opened again: %s'
                self._messages.append((text, self._path, ex))

    def _find(self, ids: Collection[int]) -> tuple[dict[int, Plant], int]:
        """Look ids up, and read the lines that the index does not know."""
        size = self._check_file().st_size
        index = self._index
        recovery.check_length(self._path, self._fd, size, index.end)
        if not index.tail_is_unchanged():
            raise IndexDamaged('the plant file was changed in place')
        offsets: dict[int, int] = {}
        # A look may move ``index.end`` to the mark. ``_read_on`` looks, too.
        if size == index.end or size - index.end > FEW_BYTES:
            offsets = index.find(ids)
        if size != index.end:
            offsets |= self._read_on(size, ids)
        plants = {
            id: recovery.plant_at(self._fd, offset, id)
            for id, offset in offsets.items()
        }
        return plants, max(offsets.values(), default=UNKNOWN)

    def _read_on(
        self, size: int, ids: Collection[int] = (), *, crashed: bool = False
    ) -> dict[int, int]:
        """Read the lines that the index does not know, and mend the end of the file.

        NOTE: with few system calls: after each this thread waits for the GIL.
        """
        found, torn = recovery.read_on(
            self._path, self._fd, self._index, size, ids, crashed=crashed
        )
        if torn is not None:
            side = recovery.cut_tail(self._path, self._fd, torn.offset)
            text = (
                f'%s: removed {size - torn.offset} bytes of an unfinished write at '
                f'byte {torn.offset} (%s); a copy is in %s'
            )
            self._messages.append((text, self._path, torn.reason, side.name))
            size = torn.offset
        self._index.move_end(size)
        if size and not self._index.tail.endswith(b'\n'):
            self._write(b'\n', size)  # the last line is a record without its line feed
            self._index.enter({}, b'\n')
        return found

    def _open_index(self, *, new: bool, crashed: bool) -> None:
        """Open the index, or build one if ``new`` or if the index shows a fault.

        Afterwards the index knows all lines, and all lines are synced.
        """
        self._check_file()  # or the index of another file would be opened
        self._index.close()
        index = self._index = Index(self._path, self._fd, new=new)
        try:
            size = os.fstat(self._fd).st_size
            recovery.check_length(self._path, self._fd, size, index.synced)
            if reason := index.build_reason:
                index.build()
                if size:
                    log.info('%s: building the index: %s', self._path, reason)
            self._read_on(size, crashed=crashed)
            if index.synced < index.end:
                # Plants of others may be unsynced, and a repeat acknowledges them.
                start = max(0, index.synced)
                for data in disk.pieces(self._fd, start, index.end):
                    disk.write(self._fd, data, start)
                    start += len(data)
                disk.sync(self._fd, times=True)  # the index has the mtime
                index.synced = index.end
            if index.build_reason:
                index.install(index.end)
        except BaseException:
            index.close()
            raise
