"""The life of a plant file: open, append, sync, detect changes by others, close.

The plant file is the only state on disk. ``record.py`` says what a line is,
``known.py`` what a process knows of the file, ``recovery.py`` what a crash leaves, and
``store/committer.py`` how plants that wait together share one write and one sync. Three
facts carry the store:

* The *lock* is an ``flock`` on the plant file itself, which the kernel releases when
  its owner dies. Only its holder writes the file, if the path still names this inode.
* The holder first *catches up*: it reads the lines that other processes have written,
  and mends the end of the file if one of them was killed.
* A plant is *acknowledged* after a sync that began after the plant was written.

**After a failed sync** the kernel may hold pages as clean that are not on the disk:
reading shows them, and another sync skips them. So a store that sees a sync fail
refuses plants until it is opened again. An open writes the last bytes of the file
again, all that may not be synced: a written page is dirty, so the next sync tells the
truth. Other processes see the failure, too: the kernel reports a failed write-back once
to each descriptor that was open then. A process has one descriptor, opened before it
trusts any line, and every sync of it goes through ``_sync``.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from store import forks
from store.base import Entry, Plant
from store.errors import IdTaken, StoreCorrupt, StoreUnavailable
from store.jsonl import disk, lock, recovery
from store.jsonl.known import REPEATED, TAIL, UNSYNCED, Known
from store.jsonl.lines import Damage, corrupt

log = logging.getLogger(__name__)

NEAR = 1024 * 1024  # bytes of others that are read under the lock
Result = TypeVar('Result')
SYNC_FAILED = 'a sync failed: the server must be reloaded'
# By path: the damage that was met last, and the state of the file then. Each add meets
# it, and to judge it anew may take long.
_judged: dict[Path, tuple[object, StoreCorrupt]] = {}


class PlantFile:
    """A plant file that is open in this process, for one thread.

    Args:
        path: Where it is.
        length: The end of the lines that any process of this server has written.
        inherited: What was known of the file before a fork.
        within: How many seconds to wait for its lock, or for a lease of others.
    """

    def __init__(
        self,
        path: Path,
        length: memoryview,
        inherited: Known | None = None,
        within: float | None = None,
    ) -> None:
        self._path, self._directory, self._within = path, str(path.parent), within
        self._is_open = False  # then only its end is mended
        self._failed_sync = ''  # the reason to refuse plants, once a sync has failed
        self._failed_write = 0  # the length of the latest write, if it failed
        self._to_say: list[tuple[int, str]] = []  # levels and lines of the log
        with disk.unavailable(path):
            disk.check_name(path)
            self._file = forks.opened(partial(disk.open_file, path, within=within))
            self._fd = self._file.fileno()
            try:
                self.known = inherited or Known(path, self._fd, length)
                # It may be another one, which had the path for a moment.
                self.known.check_same(os.fstat(self._fd))
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        synced = self.known.synced  # not by a sync of what is mended: too early
        end = self._caught_up(partial(self._write_again, synced))
        self.sync()
        if not end:
            disk.sync_directory(self._path)  # perhaps new
        self._is_open = True

    def ping(self) -> None:
        """Try an append beside the plant file; after a failed write, in it, too."""
        self._caught_up(self._try_append)

    def close(self) -> None:
        self._file.close()

    # The life of a plant: buffered, written, durable, acknowledged.

    def append(self, batch: Sequence[Entry]) -> Callable[[], None] | None:
        """Write the new plants of a batch; return the function that syncs them."""
        return self._caught_up(partial(self._append, batch))

    def _write(self, data: bytes, end: int) -> None:
        try:
            disk.write(self._fd, data, end)
        except BaseException:
            self._failed_write = len(data)
            # Cut to the last good end: the next holder of the lock would read the rest.
            # If this fails, the next holder finds a torn tail.
            with suppress(OSError, StoreUnavailable):
                if os.fstat(self._fd).st_size > end:
                    os.ftruncate(self._fd, end)
                    self._sync()  # see recovery.cut
            raise
        self._failed_write = 0

    def sync(self) -> None:
        """Make all known lines durable."""
        try:
            self._sync()
        finally:
            self._say()

    def _sync(self) -> None:
        """Sync, perhaps under the lock; the only sync of this descriptor."""
        end = self.known.end
        self._check_sync()
        try:
            disk.sync(self._fd)
        except OSError as ex:
            # First, and without memory: for want of it no failure must be forgotten.
            self._failed_sync = SYNC_FAILED
            if ex.errno in disk.NOT_SUPPORTED:
                self._failed_sync = disk.refusal(ex, self._path).reason
            what = f'a sync failed ({ex.strerror}): unsynced bytes may be lost, and no '
            what += 'plant is taken until the store is opened again (reload the server)'
            self._to_say.append((logging.CRITICAL, what))
            raise StoreUnavailable(self._failed_sync, store=str(self._path)) from ex
        self.known.synced = end

    def _check_sync(self) -> None:
        if self._failed_sync:
            raise StoreUnavailable(self._failed_sync, store=str(self._path))

    def _say(self) -> None:
        """Write what is to be said into the log, which may block: not in the lock."""
        said, self._to_say = self._to_say, []
        for level, line in said:
            log.log(level, '%s: %s', self._path, line)

    def _caught_up(self, use: Callable[[], Result]) -> Result:
        """Take the lock, know all lines, also those of other processes, and call."""
        try:
            disk.check_directory(self._directory)
            self._come_near()
            return self._locked(partial(self._catch_up_and, use))
        except OSError as ex:
            raise disk.refusal(ex, self._path) from ex
        except Damage as ex:
            with disk.unavailable(self._path):
                error = corrupt(self._path, self._fd, ex)
            _judged[self._path] = ex.state, error
            raise error from None
        finally:
            self._say()

    def _come_near(self) -> None:
        """Read many lines without the lock, for which others wait.

        Only up to an end that nobody takes back, and not beyond damage or a torn tail.
        """
        before = -1
        while before < self.known.end < os.lseek(self._fd, 0, os.SEEK_END) - NEAR:
            before = self.known.end
            whole = self._locked(self._whole)
            with suppress(Damage):  # it is judged under the lock
                self.known.read_on(self._fd, whole)

    def _locked(self, use: Callable[[], Result]) -> Result:
        """Take the lock, call, and release it: no error anywhere can keep it."""
        try:
            lock.take(self._path, self._fd, within=self._within)
            return use()
        finally:
            try:
                lock.release(self._fd)
            except BaseException:  # for want of memory, before the call
                lock.release(self._fd)  # or all others would wait
                raise

    # What follows REQUIRES the lock.

    def _look(self) -> int:
        """Return the size of the file, or raise why it takes no plants."""
        self._check_sync()
        size = self.known.check(self._fd)
        state, error = _judged.get(self._path, (None, None))
        if error is not None and state == self._state(error.offset):
            raise error.with_traceback(None)
        return size

    def _whole(self) -> int:
        return self.known.whole(self._fd, self._look())

    def _state(self, offset: int) -> object:
        """Return what is another one once damage at an offset was mended."""
        status, start = os.fstat(self._fd), os.pread(self._fd, TAIL, offset)
        return self._is_open, status.st_ino, status.st_size, status.st_ctime_ns, start

    def _catch_up_and(self, use: Callable[[], Result]) -> Result:
        """Know all lines up to the end of the file, mend that end, and call."""
        size = self._look()
        try:
            while self.known.end < size:
                self.known.read_on(self._fd, size)
                if self.known.end < size:
                    size = self._mend(size)
        except Damage as ex:
            ex.state = self._state(ex.offset)
            raise
        return use()

    def _append(self, batch: Sequence[Entry]) -> Callable[[], None] | None:
        end = self.known.end
        new: dict[int, tuple[Plant, int]] = {}  # by their ids, with their offsets
        buffer = bytearray()
        latest = -1  # the last offset of a line that an answer rests on
        for entry in batch:
            plant, line = entry.item
            found = new.get(plant.id) or self.known.find(self._fd, plant.id)
            if found is None:
                entry.new = True
                new[plant.id] = plant, end + len(buffer)
                buffer += line
                continue
            first, offset = found
            latest = max(latest, offset)
            if first != plant:
                entry.error = IdTaken.between(first, plant)
        # A repeat acknowledges the plant that was written first, perhaps by others,
        # and so does a refusal. Both wait until it is synced.
        if not buffer and latest < self.known.synced:
            return None
        if buffer:
            data = bytes(buffer)
            self._write(data, end)
            # Written: the next holder of the lock reads it, also if this one dies.
            self.known.note(new, data)
        return self.sync

    def _try_append(self) -> None:
        offset = 0
        if self._failed_write:
            # At the offset of that write: the process may have a limit. And the plant
            # file itself may be what fails: its last byte is written again.
            offset = self.known.end
            last = os.pread(self._fd, 1, max(0, offset - 1))
            disk.write(self._fd, last, max(0, offset - 1))
        disk.try_write(self._path, self._failed_write or 1, offset)

    def _write_again(self, start: int) -> int:
        """Write again what may be unsynced, also of others: repeats acknowledge it."""
        end = self.known.end
        start = max(start, end - UNSYNCED)
        for data in disk.pieces(self._fd, start, end):
            disk.write(self._fd, data, start)
            start += len(data)
        return end

    def _mend(self, size: int) -> int:
        """Mend the line after the known ones; return the new size of the file."""
        path, fd, at = self._path, self._fd, self.known.end
        line = recovery.judge(path, fd, at, size, is_opening=not self._is_open)
        if line.reason == recovery.NO_LINE_FEED:
            found = line.plant and self.known.find(fd, line.plant.id)
            if found and found[0] != line.plant:  # that is damage, and is not touched
                raise Damage(line.offset, REPEATED % found[0].id)
            disk.write(fd, b'\n', size)
            return size + 1
        if line.reason == recovery.LOST_BLOCK:
            span = line.offset, line.end
            side = recovery.blank(path, fd, [span], 'torn', self._sync)
            done = f'blanked {line.end - line.offset} bytes'
        else:
            side = recovery.cut(path, fd, line.offset, size)
            done, size = f'cut off {size - line.offset} bytes', line.offset
        # Of an unfinished write; or a reload has accepted a file that was cut short.
        what = f'{line.reason} at byte {line.offset}: {done}, which are no whole line'
        self._to_say.append((logging.WARNING, f'{what}; a copy is in {side.name}'))
        self._sync()
        return size
