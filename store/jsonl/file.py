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
trusts any line, and every sync of it goes through ``sync``.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from store import forks
from store.base import Entry, Plant
from store.errors import IdTaken, StoreCorrupt, StoreUnavailable
from store.jsonl import disk, recovery
from store.jsonl.disk import Result
from store.jsonl.known import REPEATED, TAIL, UNSYNCED, Known
from store.jsonl.record import Damage

log = logging.getLogger(__name__)

NEAR = 1024 * 1024  # bytes of others that are read under the lock
SYNC_FAILED = 'a sync failed: the server must be reloaded'
NO_DIRECTORY = 'the directory of the file cannot be written to'
# By path: the state of the file when damage was met last, the beginning of the damaged
# line, and the error. Each add meets it, and to judge it anew may take long.
_judged: dict[Path, tuple[object, bytes, StoreCorrupt]] = {}


class PlantFile:
    """A plant file that is open in this process, for one thread.

    ``known`` is what is known of it, perhaps since before a fork; ``within`` says how
    many seconds to wait for its lock, if not as many as others do.
    """

    def __init__(self, path: Path, known: Known, within: float | None) -> None:
        self.known = known
        self._path, self._directory, self._within = path, str(path.parent), within
        self._is_open = False  # then only its end is mended
        self._failed_sync = 0  # the number of its error; then it takes no plants
        self._failed_write = 0  # the length of the latest write, if it failed
        with disk.Refusing(path):
            with suppress(FileNotFoundError):  # a side file's name may be too long
                os.lstat(f'{path}.damaged-999999')
            self._file = forks.opened(partial(disk.open_file, path))
            self._fd = self._file.fileno()
            try:
                # It may be another one, which had the path for a moment.
                known.check_same(os.fstat(self._fd))
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        synced = self.known.synced  # not by a sync of what is mended: too early
        self._caught_up(partial(self._write_again, synced))
        self.sync()
        disk.sync_directory(self._path)  # it may be new, or have been moved here
        self._is_open = True

    def ping(self) -> None:
        """Try an append beside the plant file; after a failed write, in it, too."""
        self._caught_up(self._try_append)

    def close(self) -> None:
        self._file.close()

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
            with suppress(OSError):
                if os.fstat(self._fd).st_size > end:
                    os.ftruncate(self._fd, end)
                    self.sync()  # see recovery.cut
            raise
        self._failed_write = 0

    def sync(self) -> None:
        """Make all known lines durable; the only sync of this descriptor."""
        with disk.Refusing(self._path):
            try:
                disk.sync(self._fd)
            except OSError as ex:
                # First, and without memory: for want of it none must be forgotten.
                self._failed_sync = ex.errno or errno.EIO
                raise
        self.known.synced = self.known.end

    def _caught_up(self, use: Callable[[], Result]) -> Result:
        """Take the lock, know all lines, also those of other processes, and call."""
        fd, path, within = self._fd, self._path, self._within
        mended: list[str] = []
        with disk.Refusing(path):
            try:
                # Many lines are read without the lock, for which others wait; not the
                # last 128 KiB: a torn tail is cut off, and others are written there.
                before = -1
                while before < self.known.end < self._file.seek(0, os.SEEK_END) - NEAR:
                    before = self.known.end
                    size = disk.locked(path, fd, self._look, within)
                    self.known.read_on(fd, size - NEAR // 8)
                catch_up = partial(self._catch_up_and, use, mended)
                return disk.locked(path, fd, catch_up, within)
            except Damage as ex:
                error = ex.corrupt(path, fd)
                _judged[path] = self._state, ex.text[:TAIL], error
                raise error from None
            finally:  # not under the lock: the log may block
                for what in mended:
                    log.warning('%s: %s', path, what)

    # What follows REQUIRES the lock.

    def _look(self) -> int:
        """Return the size of the file, or raise why it takes no plants."""
        if self._failed_sync:
            detail = f'unsynced bytes may be lost: {os.strerror(self._failed_sync)}'
            raise StoreUnavailable(SYNC_FAILED, store=str(self._path), detail=detail)
        status = self.known.check(self._fd)
        # Or a side file could not be made in it.
        if not os.access(self._directory, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, NO_DIRECTORY)
        self._state = self._is_open, status.st_ino, status.st_size, status.st_ctime_ns
        if judged := _judged.get(self._path):
            state, text, error = judged
            is_there = os.pread(self._fd, len(text), error.offset) == text
            if is_there and state == self._state:
                raise error.with_traceback(None)
        return status.st_size

    def _catch_up_and(self, use: Callable[[], Result], mended: list[str]) -> Result:
        """Know all lines up to the end of the file, mend that end, and call."""
        size = self._look()
        while self.known.end < size:
            self.known.read_on(self._fd, size)
            if self.known.end < size:
                size = self._mend(size, mended)
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
            self._write_again(offset - 1)
        # In a file without a name. The kernel reserves the room at once, and knows
        # quotas, limits, and a disk that is read-only: no sync is needed.
        with TemporaryFile(dir=self._directory, buffering=0) as file:
            disk.write(file.fileno(), bytes(self._failed_write or 1), offset)

    def _write_again(self, start: int) -> None:
        """Write again what may be unsynced, also of others: repeats acknowledge it."""
        start = max(0, start, self.known.end - UNSYNCED)
        for data in disk.pieces(self._fd, start, self.known.end):
            disk.write(self._fd, data, start)
            start += len(data)

    def _mend(self, size: int, mended: list[str]) -> int:
        """Mend the line after the known ones; return the new size of the file."""
        path, fd = self._path, self._fd
        line = recovery.judge(fd, self.known.end, size, is_opening=not self._is_open)
        if line.reason == recovery.NO_LINE_FEED:
            found = line.plant and self.known.find(fd, line.plant.id)
            if found and found[0] != line.plant:  # that is damage, and is not touched
                raise Damage(line, REPEATED % found[0].id)
            disk.write(fd, b'\n', size)
            return size + 1
        if line.reason == recovery.LOST_BLOCK:
            span = line.offset, line.end
            side = recovery.blank(path, fd, [span], 'torn', self.sync)
        else:
            side = recovery.cut(path, fd, line.offset, size)
            size = line.offset
        # Of an unfinished write; or a reload has accepted a file that was cut short.
        mended.append(f'{line.reason} at byte {line.offset} was moved to {side.name}')
        self.sync()
        return size
