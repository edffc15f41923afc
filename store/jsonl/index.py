"""The index of a plant file: from an id to the offset of its line, in memory.

It is made from the file at each opening. It is plain memory, so a forked child can go
on with it, and shares its pages.

The ids are spread over *partitions*. Each is one array: its sorted ids, then their
offsets in the same order. That takes about 26 bytes a plant, where a dictionary takes
110. An add puts a new array in the place of a partition, in one assignment: whatever
fails, and whenever, a partition is as it was or has the new line.

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
        self._partitions = [array('q')] * PARTITIONS  # once it is used, none changes

    def __len__(self) -> int:
        own = sum(map(len, self._partitions)) // 2
        return own if self._base is None else own + len(self._base)

    def find(self, id: int) -> int | None:
        """Return the offset of an id, or ``None``."""
        both = self._partitions[(id * self._factor & _MASK) >> _SHIFT]
        half = len(both) // 2
        if half and id <= both[half - 1]:  # no search for ids that count up
            place = bisect_left(both, id, 0, half)
            if both[place] == id:
                return both[half + place]
        return None if self._base is None else self._base.find(id)

    def add(self, id: int, offset: int) -> None:
        """Enter a line, perhaps in the place of one that does not count."""
        number = (id * self._factor & _MASK) >> _SHIFT
        both = self._partitions[number]
        half = len(both) // 2
        place = bisect_left(both, id, 0, half)
        new = both[:]
        if place < half and both[place] == id:
            new[half + place] = offset
        else:
            new.insert(half + place, offset)
            new.insert(place, id)
        self._partitions[number] = new

    def enter(self, ids: Iterable[int], offsets: Iterable[int]) -> Repeats:
        """Enter lines, of which some may be there; return those whose id was known."""
        repeats = []
        for id, offset in zip(ids, offsets, strict=True):
            if (first := self.find(id)) is None:
                self.add(id, offset)
            elif first != offset:
                repeats.append((id, first, offset))
        return repeats

    def load(self, ids: Iterable[int], offsets: Iterable[int]) -> None:
        """Enter many lines into an index that nobody uses yet; ``sort`` must follow.

        Both take half the time of ``enter``.
        """
        factor, partitions = self._factor, self._partitions
        for id, offset in zip(ids, offsets, strict=True):
            number = (id * factor & _MASK) >> _SHIFT
            if not (pairs := partitions[number]):
                pairs = partitions[number] = array('q')
            pairs.append(id)
            pairs.append(offset)

    def sort(self) -> Repeats:
        """Sort what was loaded; return the lines whose id was known."""
        repeats = []
        for number, pairs in enumerate(self._partitions):
            if pairs:
                firsts = dict(zip(pairs[-2::-2], pairs[::-2], strict=True))
                for id, at in zip(pairs[::2], pairs[1::2], strict=True):
                    if firsts[id] != at:
                        repeats.append((id, firsts[id], at))
                both = array('q', sorted(firsts))
                both.extend(array('q', map(firsts.__getitem__, both)))
                self._partitions[number] = both
        return repeats
