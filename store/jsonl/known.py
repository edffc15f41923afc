"""What a process knows of a plant file: its plants by their ids, and its ends.

======  ================================  ========================================
end     of the lines before it            who moves it
======  ================================  ========================================
synced  each outlives a power cut         a sync that began after they were known
end     the ids are in the index          whoever reads on, or has written them
length  some process has written them     each process, under the lock; it is in
                                          memory that a server and its forks share
size    they are in the file, the last    any process; others read on from ``end``
        one perhaps in part
======  ================================  ========================================

It is made from the file alone. A forked child reads on from ``end``.
"""

import logging
import os
import time
from operator import itemgetter
from pathlib import Path
from typing import Self

from store.base import Plant
from store.errors import StoreUnavailable
from store.jsonl import disk, record
from store.jsonl.index import Index, Repeats
from store.jsonl.lines import chunks, corrupt, first_offset, line_at

log = logging.getLogger(__name__)

TAIL = 256  # bytes before the end that are compared
# Bytes at the end of the file that may not be synced: each process writes one batch
# between two syncs, of 1 MiB, or of as many characters by a bulk add.
UNSYNCED = 16 * 1024 * 1024
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log
REPEATED = 'an earlier line has a different plant with the id %d'
CHANGED = 'the file was changed in place: reload the server'
REPLACED = 'the file was replaced: put the old one back, or reload the server'


class Known:
    """The plants of an open file, up to an end.

    ``length`` is one number in shared memory: the end in the table above.
    """

    def __init__(self, path: Path, fd: int, length: memoryview) -> None:
        self._path = path
        self._file = os.fstat(fd)
        self._length = length
        self._index = Index()
        self.synced = 0
        self.end = first_offset(fd)
        self._tail = os.pread(fd, self.end, 0)  # the last bytes before the end

    def child(self) -> Self:
        """Return what a forked child starts with; this one must not change any more."""
        child = object.__new__(type(self))
        vars(child).update(vars(self), _index=Index(self._index))
        return child

    def check(self, fd: int) -> int:
        """Return the size of the file, if what is known of it still holds.

        If not, ``StoreUnavailable`` says why. REQUIRES: the lock.
        """
        # The path may name a file that was deleted: a mount keeps it (``st_nlink``).
        status = os.stat(self._path)
        if not os.path.samestat(status, self._file):
            raise StoreUnavailable(REPLACED, store=str(self._path))
        if not status.st_nlink:
            raise disk.gone(self._path)
        if (missing := max(self.end, self._length[0]) - status.st_size) > 0:
            raise StoreUnavailable(
                f'the file was cut short: {missing} bytes at its end are missing',
                store=str(self._path),
                detail='they held acknowledged plants: put the whole file back, or '
                'accept the loss: reload the server',
            )
        if os.pread(fd, len(self._tail), self.end - len(self._tail)) != self._tail:
            raise StoreUnavailable(CHANGED, store=str(self._path))
        return status.st_size

    def check_whole(self, fd: int) -> int:
        """Check, and return a size up to which nobody cuts a line: a torn tail is.

        REQUIRES: the lock. It need not be held while these lines are read.
        """
        size = self.check(fd)
        return size - UNSYNCED * (os.pread(fd, 1, max(0, size - 1)) != b'\n')

    def read_on(self, fd: int, size: int) -> None:
        """Read the lines up to ``size``, or to the first that is not a whole record.

        Raises:
            StoreCorrupt: Two of them are different plants with one id.
        """
        start, tail, began = self.end, self._tail, time.monotonic()
        reported = began
        is_load = size - start > disk.CHUNK and start == first_offset(fd)
        repeats: Repeats = []
        for at, chunk, _ in chunks(fd, start, size):
            ids, offsets, end = record.scan(chunk, at)
            if is_load:
                self._index.load(ids, offsets)
            else:
                repeats += self._index.enter(ids, offsets)
            self._move_end(end, chunk[: end - at])
            if end < at + len(chunk):
                break
            if (now := time.monotonic()) - reported > PROGRESS_EVERY:
                reported = now
                percent = 100 * (self.end - start) // (size - start)
                figures = percent, (size - start) >> 20, now - began
                log.info('%s: %d %% of %d MiB read, %d s', self._path, *figures)
        if is_load:
            repeats += self._index.sort()
        for id, first, other in sorted(repeats, key=itemgetter(2)):
            if self._plant_at(fd, first, id) != self._plant_at(fd, other, id):
                self.end, self._tail = start, tail  # the next use finds it again
                raise corrupt(self._path, fd, other, REPEATED % id)

    def note(self, offsets: dict[int, int], lines: bytes) -> None:
        """Note lines that this process has written at the end. REQUIRES: the lock."""
        for id, offset in offsets.items():
            self._index.add(id, offset)
        self._move_end(self.end + len(lines), lines)
        self._length[0] = self.end

    def find(self, fd: int, id: int) -> tuple[Plant, int] | None:
        """Return the plant with an id, and the offset of its line."""
        offset = self._index.find(id)
        return None if offset is None else (self._plant_at(fd, offset, id), offset)

    def _move_end(self, end: int, lines: bytes) -> None:
        self.end = end
        self._tail = (self._tail + lines[-TAIL:])[-TAIL:]

    def _plant_at(self, fd: int, offset: int, id: int) -> Plant:
        plant = line_at(fd, offset).plant
        if plant is None or plant.id != id:
            raise StoreUnavailable(CHANGED, store=str(self._path))
        return plant
