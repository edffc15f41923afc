"""The index of a plant file: from an id to the offset of its line, in memory.

It is made from the file at each opening. It is plain memory, so a forked child can go
on with it, and shares its pages.

The ids are spread over *partitions*, each with two parallel arrays: the sorted ids, and
their offsets. That takes about 26 bytes a plant, where a dictionary takes 110, and
nothing ever has to be copied as a whole: a new id moves some KiB in one partition.

A new id may change any partition. So processes that share an index since a fork put
their new ids into one of their own, with the shared one as its *base*: otherwise 10,000
adds would copy most of its pages.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from secrets import randbits

PARTITIONS = 4_096
_SHIFT = 64 - PARTITIONS.bit_length() + 1
_MASK = 2**64 - 1

Repeats = list[tuple[int, int, int]]  # an id, its first offset, another offset


class Index:
    """The offsets of lines by their ids; an id keeps its first offset.

    What the ``base`` has is found there; it no longer changes.
    """

    def __init__(self, base: 'Index | None' = None) -> None:
        self._base = base
        # The upper bits of a product choose the partition. The factor is secret: nobody
        # can choose ids that all fall into one.
        self._factor = randbits(64) | 1
        self._ids = [array('q') for _ in range(PARTITIONS)]
        self._offsets = [array('q') for _ in range(PARTITIONS)]

    def find(self, id: int) -> int | None:
        """Return the offset of an id, or ``None``."""
        partition = (id * self._factor & _MASK) >> _SHIFT
        ids = self._ids[partition]
        if ids and id <= ids[-1]:  # no search for ids that count up
            place = bisect_left(ids, id)
            if ids[place] == id:
                return self._offsets[partition][place]
        return None if self._base is None else self._base.find(id)

    def add(self, id: int, offset: int) -> None:
        """Enter a line. REQUIRES: ``find`` does not know its id."""
        partition = (id * self._factor & _MASK) >> _SHIFT
        ids = self._ids[partition]
        place = bisect_left(ids, id) if ids and id < ids[-1] else len(ids)
        ids.insert(place, id)
        self._offsets[partition].insert(place, offset)

    def enter(self, ids: Iterable[int], offsets: Iterable[int]) -> Repeats:
        """Enter lines; return those whose id was known."""
        repeats = []
        for id, offset in zip(ids, offsets, strict=True):
            if (first := self.find(id)) is None:
                self.add(id, offset)
            elif first != offset:
                repeats.append((id, first, offset))
        return repeats

    def load(self, ids: Iterable[int], offsets: Iterable[int]) -> None:
        """Enter many lines into an index without a base; ``sort`` must follow."""
        factor, all_ids, all_offsets = self._factor, self._ids, self._offsets
        for id, offset in zip(ids, offsets, strict=True):
            partition = (id * factor & _MASK) >> _SHIFT
            all_ids[partition].append(id)
            all_offsets[partition].append(offset)

    def sort(self) -> Repeats:
        """Sort what was loaded; return the lines whose id was known."""
        repeats = []
        for partition, ids in enumerate(self._ids):
            offsets = self._offsets[partition]
            firsts = dict(zip(reversed(ids), reversed(offsets), strict=True))
            if len(firsts) < len(ids):
                lines = zip(ids, offsets, strict=True)
                repeats += [
                    (id, firsts[id], at) for id, at in lines if firsts[id] != at
                ]
            ordered = sorted(firsts)
            self._ids[partition] = array('q', ordered)
            self._offsets[partition] = array('q', map(firsts.__getitem__, ordered))
        return repeats
