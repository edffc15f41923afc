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
import os
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Self

from store.base import Plant
from store.errors import StoreUnavailable
from store.jsonl import disk, record
from store.jsonl.index import Index, Repeats
from store.jsonl.lines import FAR, Damage, chunks, first_offset, line_at

log = logging.getLogger(__name__)

TAIL = 256  # bytes before the end that are compared
# Bytes at the end of the file that may not be synced: each process writes one batch
# between two syncs, of 1 MiB, or of one plant. So this is for 16 processes.
UNSYNCED = 16 * 1024 * 1024
PROGRESS_EVERY = 2.0  # seconds between two progress lines in the log
REPEATED = 'an earlier line has a different plant with the id %d'
CHANGED = 'the file was changed in place: reload the server'
REPLACED = 'the file was replaced: put the old one back'
SHORT = 'the file was cut short: %d bytes at its end are missing'
# Of what a reload does about both.
ACCEPTED = 'a reload takes the file that is there, and gives ids that it lacks again'


class Read(NamedTuple):
    """What was read of the file: lines up to an end."""

    plants: Index
    end: int
    tail: bytes  # the last bytes before the end


class Known:
    """The plants of an open file, up to an end.

    ``length`` is one number in shared memory: the end in the table above.
    """

    def __init__(self, path: Path, fd: int, length: memoryview) -> None:
        self._path, self._length = path, length
        self._file = os.fstat(fd)
        self.synced = 0
        self._read = Read(Index(), first_offset(fd), b'')

    @property
    def end(self) -> int:
        """The end of the lines that are known."""
        return self._read.end

    @property
    def count(self) -> int:
        """The number of ids."""
        return len(self._read.plants)

    def child(self) -> Self:
        """Return what a forked child starts with; this one must not change any more."""
        child = copy.copy(self)
        child._read = self._read._replace(plants=Index(self._read.plants))
        return child

    def check_same(self, status: os.stat_result) -> None:
        """Refuse another file than that of which something is known."""
        if not os.path.samestat(status, self._file):
            raise self._refusal(REPLACED, ACCEPTED)

    def check(self, fd: int) -> int:
        """Return the size of the file, if what is known of it still holds.

        If not, ``StoreUnavailable`` says why. REQUIRES: the lock.
        """
        # The path may name a file that was deleted: a mount keeps it (``st_nlink``).
        status, (_, end, tail) = os.stat(self._path), self._read
        self.check_same(status)
        if not status.st_nlink:
            raise disk.gone(self._path)
        if (missing := max(end, self._length[0]) - status.st_size) > 0:
            raise self._refusal(SHORT % missing, f'put the whole one back; {ACCEPTED}')
        if os.pread(fd, len(tail), end - len(tail)) != tail:
            raise self._refusal(CHANGED)
        return status.st_size

    def whole(self, fd: int, size: int) -> int:
        """Return up to where no line is taken back, as a torn tail is.

        REQUIRES: the lock. It need not be held while these lines are read.
        """
        last = os.pread(fd, FAR, max(0, size - FAR))
        return size - len(last) + last.rfind(b'\n') + 1

    def read_on(self, fd: int, size: int) -> None:
        """Read the lines up to ``size``, or to the first that is not a whole record.

        The end moves when a piece has been read, entered and compared. If no line is
        known yet, all are one piece, and sorted at its end: that takes half the time.

        Raises:
            Damage: Two of them are different plants with one id.
        """
        read = self._read
        is_first = not read.tail
        index = Index() if is_first else read.plants
        for ids, offsets, read in self._scan(fd, size, index):
            if is_first:
                index.load(ids, offsets)
            else:
                self._move(fd, index.enter(ids, offsets), read)
        if is_first:
            self._move(fd, index.sort(), read)

    def _scan(
        self, fd: int, size: int, index: Index
    ) -> Iterator[tuple[list[int], list[int], Read]]:
        """Yield the ids and offsets of records after the end, and what is read then."""
        _, start, tail = self._read
        began = reported = time.monotonic()
        for at, chunk, _ in chunks(fd, start, size):
            ids, offsets, end = record.scan(chunk, at)
            tail = (tail + chunk[: end - at][-TAIL:])[-TAIL:]
            yield ids, offsets, Read(index, end, tail)
            if end < at + len(chunk):
                break
            if (now := time.monotonic()) - reported > PROGRESS_EVERY:
                reported, percent = now, 100 * (end - start) // (size - start)
                figures = percent, (size - start) >> 20, now - began
                log.info('%s: %d %% of %d MiB read, %d s', self._path, *figures)

    def _move(self, fd: int, repeats: Repeats, read: Read) -> None:
        """Know more lines, which were entered: up to the first that is damaged."""
        for id, first, other in sorted(repeats, key=itemgetter(2)):
            if self._plant_at(fd, first, id) != self._plant_at(fd, other, id):
                tail = os.pread(fd, min(TAIL, other), max(0, other - TAIL))
                self._read = Read(read.plants, other, tail)
                raise Damage(other, REPEATED % id)
        self._read = read

    def note(self, new: dict[int, tuple[Plant, int]], lines: bytes) -> None:
        """Note lines that this process has written at the end. REQUIRES: the lock.

        The plants are given with their offsets, by their ids.
        """
        index, end, tail = self._read
        for id, (_, offset) in new.items():
            index.add(id, offset)
        end += len(lines)
        self._length[0] = end
        self._read = Read(index, end, (tail + lines[-TAIL:])[-TAIL:])

    def find(self, fd: int, id: int) -> tuple[Plant, int] | None:
        """Return the plant with an id, and the offset of its line."""
        index, end, _ = self._read
        if (offset := index.find(id)) is None or offset >= end:
            return None
        return self._plant_at(fd, offset, id), offset

    def _plant_at(self, fd: int, offset: int, id: int) -> Plant:
        plant = line_at(fd, offset).plant
        if plant is None or plant.id != id:
            raise self._refusal(CHANGED)
        return plant

    def _refusal(self, reason: str, detail: str = '') -> StoreUnavailable:
        return StoreUnavailable(reason, store=str(self._path), detail=detail)
