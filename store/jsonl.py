"""The embedded store: a file of JSON lines, shared by any number of processes.

``store/record.py`` says what a line is, ``store/index.py`` how an id is found, and
``store/group_commit.py`` how plants that wait together share one write and one sync.
What is here is the life of the file. Three facts carry it:

* The *lock* is an ``flock`` on the plant file itself. The kernel gives it back when its
  owner dies. Whoever holds it may write the file and the index, nobody else does.
* The *end* is the size of the file up to which the index knows it. Under the lock the
  file's size is the end, unless a process died between its write and its index (or
  somebody else wrote): then whoever comes next catches the index up first.
* A plant is *acknowledged* after a sync that began after it was written.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import ExitStack
from contextlib import closing
from contextlib import contextmanager
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from typing import TypeVar

from store import index as id_index
from store import record
from store.base import Create
from store.base import Plant
from store.base import Progress
from store.base import Verified
from store.errors import IdTaken
from store.errors import StoreClosed
from store.errors import StoreCorrupt
from store.errors import StoreUnavailable
from store.group_commit import SLOW_SYNCS_IN_FLIGHT
from store.group_commit import Entry
from store.group_commit import GroupCommit
from store.group_commit import outcomes
from store.lazy import LazyStore
from store.recovery import CHUNK
from store.recovery import TornTail
from store.recovery import cut_tail
from store.recovery import expected_records
from store.recovery import line_number
from store.recovery import read_plants
from store.recovery import scan_ids
from store.recovery import sync_directory
from store.scheduler import THREADS
from store.scheduler import Scheduler

log = logging.getLogger(__name__)

Result = TypeVar('Result')

CLOSE_WITHIN = 2.0  # seconds that closing waits for who has the lock
CLOSE_POLLS = 0.01  # seconds between two looks whether another process still has it


class JSONLinesStore(LazyStore['_PlantFile']):
    """Keep plants in a file of JSON lines; durable when the disk says so.

    An add returns after ``fdatasync``. A new file has mode 0600. A line that somebody
    has written twice is accepted, and yielded twice.

    Args:
        path: Of the plant file. The index is beside it, with ``.index`` added.
        create: Whether a file that is missing is made: ``always``, ``never``, or
            ``first``, only if its index is missing too. A new file forgets every id.
        system: The system calls, so that tests can make them fail; the ``os`` module.
    """

    can_repair = True

    def __init__(
        self,
        path: str | Path,
        *,
        create: Create = 'first',
        scheduler: Scheduler = THREADS,
        system: Any = os,
    ) -> None:
        super().__init__(scheduler=scheduler)
        self._pinned: tuple[int, int] | None = None
        # Resolved, so that a file has one index whatever name it is called by.
        # NOTE: not Path.resolve(), which raises RuntimeError where links make a loop.
        self.path = Path(os.path.realpath(path))
        self._create = create
        self._system = system

    def add(self, plant: Plant) -> bool:
        return self._backend().add(plant)

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        return self._backend().add_many(plants)

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        return read_plants(self.path)

    def size_hint(self) -> int:
        self._check_open()
        with suppress(OSError), self.path.open('rb') as file:
            return expected_records(file.fileno())
        return 0

    def verify(self, *, repair: bool = False, progress: Progress = iter) -> Verified:
        self._check_open()
        # Imported here: a server needs none of it.
        from store.repair import verify

        return verify(self.path, move=repair, progress=progress)

    def check_opening(self) -> None:
        """Return if the file could be opened or made; its lines are not read."""
        self._check_open()
        with _unavailable(self.path):
            if self.path.exists():
                os.close(self._system.open(self.path, os.O_RDWR | os.O_CLOEXEC))
            # Where the index is, or will be.
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                reason = 'its directory does not exist, or cannot be written to'
                raise StoreUnavailable(reason, store=str(self.path))

    def pin(self) -> None:
        with _unavailable(self.path):
            status = self.path.stat()
        self._pinned = status.st_dev, status.st_ino
        self._create = 'never'

    def _open_backend(self) -> _PlantFile:
        return _PlantFile(
            self.path,
            self._create,
            self._system,
            self._pinned,
            self._scheduler,
            self._report_sync,
        )


class _PlantFile:
    """A plant file that is open in this process."""

    def __init__(
        self,
        path: Path,
        create: Create,
        system: Any,
        pinned: tuple[int, int] | None,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
    ) -> None:
        self._scheduler = scheduler
        self._path = path
        self._index_path = path.with_name(path.name + '.index')
        self._system = system
        self._closing = False
        self._failed_sync: OSError | None = None
        self._commit = GroupCommit(
            self._append, self._sync, scheduler=scheduler, observe=observe
        )
        with _unavailable(path), ExitStack() as opened:
            self._fd = self._open(create)
            opened.callback(os.close, self._fd)
            self._lock = _FileLock(self._fd, scheduler)
            self._file = opened.enter_context(
                open(self._fd, 'rb', buffering=0, closefd=False)
            )
            status = os.fstat(self._fd)
            if pinned not in (None, (status.st_dev, status.st_ino)):
                raise self._unavailable('the file was replaced by another')
            self._identity = id_index.Identity(status.st_dev, status.st_ino, _boot_id())
            # NOTE: the kernel reports a failed write-back once to each open file, at
            # its next sync. Syncs that overlap on one descriptor would share that one
            # report: the first would fail, and the second lie. So each has its own,
            # opened now, since an open forgets what was reported before it.
            self._sync_fds = SimpleQueue[int]()
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                fd = self._system.open(path, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                if not os.path.sameopenfile(fd, self._fd):
                    raise self._unavailable('the file was replaced while it was opened')
                self._sync_fds.put(fd)
            self._index_file = opened.enter_context(ExitStack())
            with self._lock:
                self._open_index()
                self._with_index(self._catch_up)
                # What another process wrote may not be on the disk yet, and a repeat
                # of it would be acknowledged by this one.
                try:
                    self._system.fdatasync(self._fd)
                except OSError:
                    self._index.retire()  # see _latch
                    raise
            self._opened = opened.pop_all()

    def add(self, plant: Plant) -> bool:
        line = record.encode(plant)
        return self._commit.submit((plant, line), len(line))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        batch = [Entry((plant, record.encode(plant)), 0) for plant in plants]
        if self._append(batch):
            self._sync()
        return outcomes(batch)

    def ping(self) -> None:
        with _unavailable(self._path):
            with self._lock:
                self._with_index(self._catch_up)
                self._index.reserve(1)
            if not os.fstatvfs(self._fd).f_bavail:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        # Else its owner is stuck, another process or a thread that was interrupted for
        # good, as at the end of this process. What is open ends with that.
        with suppress(TimeoutError):
            with self._lock.within(CLOSE_WITHIN):
                self._closing = True  # no append begins after this
            # A thread that syncs has one of these: with all in hand nobody does.
            for _ in range(SLOW_SYNCS_IN_FLIGHT):
                self._sync_fds.get()
            self._sync_fds.put(-1)
            with self._lock.within(CLOSE_WITHIN):
                with suppress(OSError, id_index.IndexDamaged):
                    self._close_index()
                self._lock.closed = True
            self._opened.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Give the descriptors back in a child; the parent goes on with its own."""
        self._opened.close()

    def _open(self, create: Create) -> int:
        """Open the file; make it, durably, if it may be made."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if create == 'always' or (create == 'first' and not self._index_path.exists()):
            flags |= os.O_CREAT
        try:
            fd: int = self._system.open(self._path, flags, 0o600)
        except FileNotFoundError as ex:
            if flags & os.O_CREAT:
                raise self._unavailable('its directory does not exist') from ex
            remedy = (
                'reload the server'
                if create == 'never'
                else f'remove {self._index_path.name}'
            )
            raise self._unavailable(
                f'the file is gone: put it back, or {remedy} to start with an empty one'
            ) from ex
        try:
            # Also if it was there: whoever made it may have died before this.
            if not os.fstat(fd).st_size:
                sync_directory(self._path, self._system)
        except BaseException:
            os.close(fd)
            raise
        return fd

    # The life of a plant: buffered, written, durable, acknowledged.

    def _append(self, batch: Sequence[Entry[tuple[Plant, bytes]]]) -> bool:
        """Write the new plants of a batch; return whether any needs a sync."""
        try:
            with self._lock:
                return self._with_index(lambda: self._append_locked(batch))
        except OSError as ex:
            raise _refused(ex, self._path) from ex

    def _append_locked(self, batch: Sequence[Entry[tuple[Plant, bytes]]]) -> bool:
        end = self._catch_up()
        # Buffered. A repeat is an acknowledgement too: its first write, perhaps by
        # another process, may not be synced yet, so it waits for a sync like the rest.
        added: dict[int, Plant] = {}
        offsets: list[tuple[int, int]] = []
        lines: list[bytes] = []
        position = end
        needs_sync = False
        for entry in batch:
            plant, line = entry.item
            stored = added.get(plant.id) or self._find(plant.id, end)
            if stored is None:
                added[plant.id] = plant
                offsets.append((plant.id, position))
                lines.append(line)
                position += len(line)
            entry.new = stored is None
            entry.error = None if stored in (None, plant) else IdTaken(plant.id)
            needs_sync |= entry.error is None
        if lines:
            data = b''.join(lines)
            # Room in the index first: afterwards entering the ids cannot fail.
            self._index.reserve(len(offsets))
            self._write(data, end)
            # Written. A process that dies from here on, before the index knows,
            # leaves a file that is longer than the index says: _catch_up.
            for id, offset in offsets:
                self._index.put(id, offset)
            self._index.advance(position, data)
        return needs_sync

    def _write(self, data: bytes, end: int) -> None:
        written = 0
        try:
            while written < len(data):
                count = self._system.pwrite(self._fd, data[written:], end + written)
                if not count:
                    raise OSError(errno.EIO, 'nothing could be written')
                written += count
        except BaseException:
            # Back to the last good end. If that fails too, the file is longer than
            # the index says, and whoever holds the lock next deals with it.
            with suppress(OSError):
                self._system.ftruncate(self._fd, end)
            raise

    def _sync(self, written: bool = True) -> None:
        fd = self._sync_fds.get()
        try:
            if fd < 0:  # pragma: no cover - it came after close, between two lines
                raise StoreClosed
            self._system.fdatasync(fd)
        except OSError as ex:
            self._latch(ex)
            raise self._latched() from ex
        finally:
            self._sync_fds.put(fd)
        # Durable, and acknowledged when the caller returns; unless another sync, which
        # may have covered the same bytes, has failed meanwhile.
        if self._failed_sync is not None:
            raise self._latched()

    def _latch(self, error: OSError) -> None:
        """Take nothing any more: the kernel may have dropped what was not synced.

        After a failed write-back the kernel may hold a page as clean that is not on the
        disk: reading shows it, and another sync skips it. So the index is retired, and
        whoever builds it again writes the file again first (_build_index).
        """
        self._failed_sync = error
        log.critical(
            '%s: a sync failed (%s): what it covered may be lost, and no plant is '
            'taken until the store is opened again (reload the server)',
            self._path,
            error.strerror,
        )
        with suppress(OSError, StoreClosed), self._lock:
            self._index.retire()

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(reason, store=str(self._path))

    def _latched(self) -> StoreUnavailable:
        return self._unavailable('a sync failed: the server must be reloaded')

    # What follows REQUIRES the lock.

    def _check_file(self) -> int:
        """Return the size of the file, if it still is the one that was opened."""
        if self._closing:  # pragma: no cover - it waited for the lock meanwhile
            raise StoreClosed
        if self._failed_sync is not None:
            raise self._latched()
        status = os.stat(self._path)
        if (status.st_dev, status.st_ino) != self._identity[:2]:
            raise self._unavailable(
                'the file was replaced by another: put the old one back, or reload '
                'the server'
            )
        return status.st_size

    def _catch_up(self) -> int:
        """Return the end of the file, with the index up to it.

        A process may have died between its write and the index, or in the middle of a
        line: that is dealt with here, before each append, not only when a store opens.
        """
        size = self._check_file()
        # Whoever has removed or replaced it can tell nobody who has it mapped.
        if not os.fstat(self._index_fd).st_nlink:
            raise id_index.IndexDamaged('it was removed')
        self._index.refresh()
        end = self._index.end
        if size < end:
            raise self._unavailable(
                'somebody has cut the file short: the server must be reloaded'
            )
        if size > end:
            self._index.check_tail(self._file)
            self._index_records(end)
            end = self._index.end
        return end

    def _index_records(self, start: int) -> None:
        """Enter the records from an offset on, which the index does not know."""
        for id, offset in self._records(start):
            # A process that died may have entered some of them.
            stored = self._find(id, offset)
            if stored is None:
                self._index.reserve(1)
                self._index.put(id, offset)
            else:
                self._check_repeat(stored, offset)
        self._advance(self._index)

    def _records(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the id and the offset of each record; cut a torn tail off."""
        end = os.fstat(self._fd).st_size
        try:
            yield from scan_ids(self._path, self._file, start, end)
        except TornTail as torn:
            side = cut_tail(self._path, self._fd, torn.offset, self._system)
            log.warning(
                '%s: a torn tail of %d bytes at byte %d, which was never '
                'acknowledged (%s), is cut off and kept in %s',
                self._path,
                end - torn.offset,
                torn.offset,
                torn.reason,
                side.name,
            )

    def _check_repeat(self, stored: Plant, offset: int) -> None:
        """Accept a plant that is in the file twice, but not two with one id."""
        if self._read(offset) != stored:
            raise StoreCorrupt(
                str(self._path),
                line_number(self._file, offset),
                offset,
                f'its id is that of a different plant, {stored.id}',
            )

    def _advance(self, index: id_index.Index) -> None:
        end = os.fstat(self._fd).st_size
        start = max(0, end - id_index.TAIL)
        index.advance(end, os.pread(self._fd, end - start, start))

    def _find(self, id: int, end: int) -> Plant | None:
        """Return the plant that has an id."""
        offset = self._index.get(id)
        if offset is None or offset >= end:
            return None
        try:
            plant = self._read(offset)
        except StoreCorrupt:
            plant = None
        if plant is None or plant.id != id:
            # The index or the file: building it again tells.
            raise id_index.IndexDamaged('an entry is not of this file')
        return plant

    def _read(self, offset: int) -> Plant:
        """Return the plant at an offset."""
        line = b''
        while not line.endswith(b'\n'):
            piece = os.pread(self._fd, 512 + 15 * len(line), offset + len(line))
            line += piece[: piece.find(b'\n') + 1] or piece
            if not piece:  # pragma: no cover - somebody has cut the file since
                break
        try:
            return record.decode(line)
        except record.DamagedRecord as ex:
            raise StoreCorrupt(
                str(self._path), line_number(self._file, offset), offset, str(ex)
            ) from ex

    def _with_index(self, action: Callable[[], Result]) -> Result:
        """Do something, once more with another index if this one is damaged."""
        try:
            return action()
        except id_index.IndexDamaged as ex:
            log.warning('%s: the index is not used any more: %s', self._path, ex)
            # So that nobody believes it, neither who has it mapped nor who opens it
            # next. It may be retired already, and another in its place.
            self._index.retire()
        try:
            self._scheduler.call(self._open_index)
            return action()
        except id_index.IndexDamaged as ex:  # pragma: no cover - twice in a row
            raise self._unavailable(f'the index: {ex}') from ex

    def _open_index(self) -> None:
        """Open the index, or build it again if it is not to be believed."""
        try:
            self._map_index()
            reason = self._index.distrust(self._identity, self._file)
            if reason is not None:
                self._index.retire()
        except FileNotFoundError:
            reason = 'there is none'
        except id_index.IndexDamaged as ex:
            reason = str(ex)
        if reason is not None:
            self._build_index(reason)
        self._index.mark_open(self._identity.boot)

    def _map_index(self) -> None:
        """Use the index file that is there, in the place of the one in use."""
        with ExitStack() as opened:
            fd = self._system.open(self._index_path, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            # Shared by all who use this file: who can have it alone is the last.
            fcntl.flock(fd, fcntl.LOCK_SH)
            index = id_index.Index(fd, self._system)
            opened.callback(index.close)
            self._index_file.close()
            self._index, self._index_fd = index, fd
            self._index_file.enter_context(opened.pop_all())

    def _build_index(self, reason: str) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            log.info('%s: building the index: %s', self._path, reason)
        new = self._index_path.with_name(self._index_path.name + '.new')
        repeated = id_index.build(new, self._identity, self._records(0), self._system)
        first: dict[int, Plant] = {}
        if repeated:
            ids = {id for id, _ in repeated}
            for id, offset in scan_ids(self._path, self._file, 0, size):
                if id in ids:
                    self._check_repeat(first.setdefault(id, self._read(offset)), offset)
        # A sync may have failed before, and what told it is lost with the old index.
        self._write_again()
        # Whole before it has its name: who dies after that leaves it to be believed.
        with new.open('r+b') as file, closing(id_index.Index(file.fileno())) as index:
            self._advance(index)
        os.replace(new, self._index_path)
        self._map_index()

    def _write_again(self) -> None:
        """Make the whole file durable, whatever became of earlier syncs.

        Writing a page makes it dirty, and then a sync tells the truth about it.
        """
        start = 0
        while data := os.pread(self._fd, CHUNK, start):
            start += self._system.pwrite(self._fd, data, start)
        self._system.fdatasync(self._fd)

    def _close_index(self) -> None:
        """Let the index be believed after a boot, if this is its last user."""
        self._index.refresh()
        fcntl.flock(self._index_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(self._fd)
        if self._index.end == status.st_size and self._failed_sync is None:
            self._index.mark_closed(status.st_mtime_ns)


class _FileLock:
    """The lock of a plant file, among processes and among the threads of this one.

    Raises:
        StoreClosed: On entering, after ``closed`` was set.
    """

    def __init__(self, fd: int, scheduler: Scheduler) -> None:
        self._fd = fd
        self._scheduler = scheduler
        self._mutex = threading.Lock()  # threads share the descriptor, so the flock too
        self.closed = False

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Take it if it is given back before long.

        Raises:
            TimeoutError: It is not.
        """
        deadline = time.monotonic() + seconds
        if not self._mutex.acquire(timeout=seconds):
            raise TimeoutError
        try:
            while not self._try_lock():
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(CLOSE_POLLS)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __enter__(self) -> None:
        if not self._mutex.acquire(blocking=False):
            self._scheduler.call(self._mutex.acquire)
        try:
            if self.closed:
                raise StoreClosed
            if not self._try_lock():
                self._scheduler.call(partial(fcntl.flock, self._fd, fcntl.LOCK_EX))
        except BaseException:
            self._mutex.release()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()


def _boot_id() -> bytes:
    text = Path('/proc/sys/kernel/random/boot_id').read_text()
    return bytes.fromhex(text.strip().replace('-', ''))


def _refused(error: OSError, path: Path) -> StoreUnavailable:
    if isinstance(error, FileNotFoundError):
        return StoreUnavailable('the file is gone', store=str(path))
    return StoreUnavailable.refused(error, path)


@contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as ex:
        raise _refused(ex, path) from ex
