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

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from store import forks
from store.base import Plant
from store.committer import Entry
from store.errors import IdTaken, StoreUnavailable
from store.jsonl import disk, lock, recovery
from store.jsonl.known import REPEATED, UNSYNCED, Known
from store.jsonl.lines import corrupt

log = logging.getLogger(__name__)

SYNC_FAILED = 'a sync failed: the server must be reloaded'


class PlantFile:
    """A plant file that is open in this process, for one thread.

    ``inherited`` is what was known of the file before a fork.
    """

    def __init__(
        self, path: Path, length: memoryview, inherited: Known | None = None
    ) -> None:
        self._path = path
        self._failed_sync: StoreUnavailable | None = None
        self._failed_write = 0  # the length of the latest write, if it failed
        self._mended: list[str] = []  # logged when the lock is released
        try:
            with disk.unavailable(path):
                disk.check_directory(path)
                self._fd = disk.open_file(path)
                forks.owned[self] = self._fd
                self._open(length, inherited)
        except BaseException:
            self.close()
            raise

    def _open(self, length: memoryview, inherited: Known | None) -> None:
        self.known = inherited or Known(self._path, self._fd, length)
        # Most lines are read without the lock, for which others wait.
        with lock.held(self._path, self._fd, fcntl.LOCK_SH):
            size = self.known.check_whole(self._fd)
        self.known.read_on(self._fd, size)
        synced = self.known.synced  # not by a sync of what is mended: too early
        with self._locked():
            self._catch_up(is_opening=True)
            # Lines of others may be unsynced, and a repeat acknowledges them.
            end = self.known.end
            start = max(synced, end - UNSYNCED)
            for data in disk.pieces(self._fd, start, end):
                disk.write(self._fd, data, start)
                start += len(data)
        self._sync()
        if not end:
            disk.sync_directory(self._path)  # perhaps new

    def ping(self) -> None:
        """Try an append beside the plant file; after a failed write, in it, too."""
        with disk.unavailable(self._path), self._locked():
            self._catch_up()
            offset = 0
            if self._failed_write:
                # At the offset of that write: the process may have a limit. And the
                # plant file itself may be what fails: its last byte is written again.
                offset = self.known.end
                last = os.pread(self._fd, 1, max(0, offset - 1))
                disk.write(self._fd, last, max(0, offset - 1))
            disk.try_write(self._path, self._failed_write or 1, offset)

    def close(self) -> None:
        forks.close(self)

    # The life of a plant: buffered, written, durable, acknowledged.

    def append(self, batch: Sequence[Entry]) -> Callable[[], None] | None:
        """Write the new plants of a batch; return the function that syncs them."""
        with disk.unavailable(self._path), self._locked():
            self._catch_up()
            end = self.known.end
            stored: dict[int, Plant] = {}
            offsets: dict[int, int] = {}  # of new plants
            buffer = bytearray()
            latest = -1  # the last offset of a line that an answer rests on
            for entry in batch:
                plant, line = entry.item
                first = stored.get(plant.id)
                if first is None and (found := self.known.find(self._fd, plant.id)):
                    first, offset = found
                    latest = max(latest, offset)
                entry.new = first is None
                if first is None:
                    first = plant
                    offsets[plant.id] = end + len(buffer)
                    buffer += line
                stored[plant.id] = first
                entry.error = None if first == plant else IdTaken(plant.id)
            # A repeat acknowledges the plant that was written first, perhaps by others,
            # and so does a refusal. Both wait until it is synced.
            if not buffer and latest < self.known.synced:
                return None
            if buffer:
                data = bytes(buffer)
                self._write(data, end)
                # Written: the next holder of the lock reads it, also if this one dies.
                self.known.note(offsets, data)
        return self._sync

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

    def _sync(self) -> None:
        """Make all known lines durable; the only sync of this descriptor."""
        end = self.known.end
        self._check_sync()
        try:
            disk.sync(self._fd)
        except OSError as ex:
            failed = StoreUnavailable(SYNC_FAILED, store=str(self._path))
            if ex.errno in disk.NOT_SUPPORTED:
                failed = disk.refusal(ex, self._path)
            self._failed_sync = failed
            log.critical(
                '%s: a sync failed (%s): unsynced bytes may be lost, and no plant '
                'is taken until the store is opened again (reload the server)',
                self._path,
                ex.strerror,
            )
            raise self._failed_sync from ex
        self.known.synced = end

    def _check_sync(self) -> None:
        if self._failed_sync is not None:
            raise self._failed_sync.with_traceback(None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and log after its release, since a log may block."""
        try:
            with lock.held(self._path, self._fd):
                yield
        finally:
            for mended in self._mended:
                log.warning('%s: %s', self._path, mended)
            self._mended.clear()

    # What follows REQUIRES the lock.

    def _catch_up(self, *, is_opening: bool = False) -> None:
        """Know all lines, also those that other processes have written since."""
        self._check_sync()
        size = self.known.check(self._fd)
        while self.known.end < size:
            self.known.read_on(self._fd, size)
            if self.known.end < size:
                size = self._mend(size, is_opening=is_opening)

    def _mend(self, size: int, *, is_opening: bool) -> int:
        """Mend the line after the known ones; return the new size of the file."""
        path, fd, at = self._path, self._fd, self.known.end
        line = recovery.judge(path, fd, at, size, is_opening=is_opening)
        if line.reason == recovery.NO_LINE_FEED:
            found = line.plant and self.known.find(fd, line.plant.id)
            if found and found[0] != line.plant:  # that is damage, and is not touched
                raise corrupt(path, fd, line.offset, REPEATED % found[0].id)
            disk.write(fd, b'\n', size)
            return size + 1
        if line.reason == recovery.LOST_BLOCK:
            span = line.offset, line.end
            side = recovery.blank(path, fd, [span], 'torn', self._sync)
            done = f'blanked {line.end - line.offset}'
        else:
            side = recovery.cut(path, fd, line.offset, size)
            done, size = f'cut off {size - line.offset}', line.offset
        self._mended.append(
            f'{line.reason} at byte {line.offset}: {done} bytes of an unfinished '
            f'write; a copy is in {side.name}'
        )
        self._sync()
        return size
