"""What a process knows of a plant file: its plants by their ids, and its ends.

======  ================================  ========================================
end     of the lines before it            who moves it
======  ================================  ========================================
synced  each outlives a power cut         a sync that began after they were known
end     the ids are in the index          whoever has read on, or written them
length  some process has written them     each process, under the lock; it is in
                                          memory that a server and its forks share
size    they are in the file, the last    any process; others read on from ``end``
        one perhaps in part
======  ================================  ========================================

It is made from the file alone. A forked child reads on from ``end``.

**Each end moves last**, in one assignment, when all that it stands for has worked. The
index may have lines behind ``end``, of a read that failed half way: they do not count
until ``end`` has passed them, and are entered again at the same offsets.
"""

import copy
import logging
import mmap
import os
import time
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Self

from store.base import Plant
from store.jsonl.index import Index
from store.jsonl.record import Damage, chunks, line_at, scan

log = logging.getLogger(__name__)

TAIL = 256  # bytes before the end that are compared
# Bytes at the end that may not be synced: of 16 processes, each a batch of 1 MiB.
UNSYNCED = 16 * 1024 * 1024
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log
REPEATED = 'an earlier line has a different plant with the id %d'
CHANGED = 'the file was changed in place: reload the server'
REPLACED = 'the file was replaced: put the old one back'
SHORT = 'the file was cut short: %d bytes at its end are missing'


class Known:
    """The plants of a file, up to an end; at first none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.stat(path) if os.path.exists(path) else None  # for children
        self.plants = Index()  # by their ids
        self.synced = 0
        self._read = 0, b''  # the end, and the last bytes before it
        self._length = memoryview(mmap.mmap(-1, 8)).cast('q')

    @property
    def end(self) -> int:
        """The end of the lines that are known."""
        return self._read[0]

    def child(self) -> Self:
        """Return what an opening starts with; this one must not change any more."""
        child = copy.copy(self)
        child.plants = Index(self.plants)
        return child

    def check_same(self, status: os.stat_result) -> None:
        """Refuse another file than that of which something is known, if any."""
        self._file = self._file or status
        if not os.path.samestat(status, self._file):
            raise OSError(REPLACED)

    def check(self, fd: int) -> os.stat_result:
        """Return the status of the file, if what is known of it still holds.

        If not, an error says why. REQUIRES: the lock.
        """
        # The path may name a file that was deleted: a mount keeps it (``st_nlink``).
        status, (end, tail) = os.stat(self._path), self._read
        self.check_same(status)
        if not status.st_nlink:
            raise FileNotFoundError
        self._length[0] = length = max(end, self._length[0])
        if length > status.st_size:
            raise OSError(SHORT % (length - status.st_size))
        is_ours = os.path.samestat(os.fstat(fd), status)  # no host has closed it
        if not is_ours or os.pread(fd, len(tail), end - len(tail)) != tail:
            raise OSError(CHANGED)
        return status

    def read_on(self, fd: int, size: int) -> None:
        """Read the lines up to ``size``, or to the first that is not a whole record.

        Raises ``Damage`` if two are different plants with one id; none is known then.
        """
        start, tail = read = self._read
        said = time.monotonic()

        def lines() -> Iterator[list[tuple[int, int]]]:
            nonlocal read, said, tail
            for at, chunk, _ in chunks(fd, start, size):
                found, end = scan(chunk, at)
                yield found
                tail = (tail + chunk[: end - at][-TAIL:])[-TAIL:]
                read = end, tail
                if end < at + len(chunk):
                    break
                if end < size and (now := time.monotonic()) - said > PROGRESS_EVERY:
                    said, percent = now, 100 * (end - start) // (size - start)
                    log.info('%s: %d %% read', self._path, percent)

        # Until one read has worked each has a new index: a failed one leaves nothing.
        plants = self.plants if tail else Index()
        enter = plants.enter if tail else plants.load
        repeats = enter(chain.from_iterable(lines()))
        for id, first, other in sorted(repeats, key=itemgetter(2)):
            if self._plant_at(fd, first, id) != self._plant_at(fd, other, id):
                raise Damage(line_at(fd, other), REPEATED % id)
        self.plants = plants
        self._read = read

    def note(self, new: dict[int, tuple[Plant, int]], lines: bytes) -> None:
        """Note lines that this process has written at the end. REQUIRES: the lock.

        The plants are given with their offsets, by their ids.
        """
        end, tail = self._read
        for id, (_, offset) in new.items():
            self.plants.add(id, offset)
        end += len(lines)
        self._length[0] = end
        self._read = end, (tail + lines[-TAIL:])[-TAIL:]

    def find(self, fd: int, id: int) -> tuple[Plant, int] | None:
        """Return the plant with an id, and the offset of its line."""
        if (offset := self.plants.find(id)) is None or offset >= self.end:
            return None
        return self._plant_at(fd, offset, id), offset

    def _plant_at(self, fd: int, offset: int, id: int) -> Plant:
        plant = line_at(fd, offset).plant
        if plant is None or plant.id != id:
            raise OSError(CHANGED)
        return plant
