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
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
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
        self._base = base or None  # an empty one is none
        # The upper bits of a product choose the partition. The factor is secret: nobody
        # can choose ids that all fall into one.
        self._factor = randbits(64) | 1
        self._partitions = [array('q')] * PARTITIONS  # once it is used, none changes

    def __len__(self) -> int:
        return sum(map(len, self._partitions)) // 2 + len(self._base or ())

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

    def enter(self, lines: Iterable[tuple[int, int]]) -> Repeats:
        """Enter lines, of which some may be there; return those whose id was known."""
        repeats = []
        for id, offset in lines:
            if (first := self.find(id)) is None:
                self.add(id, offset)
            elif first != offset:
                repeats.append((id, first, offset))
        return repeats

    def load(self, lines: Iterable[tuple[int, int]]) -> Repeats:
        """Do the same for an index that has no line yet, in half the time."""
        factor, repeats = self._factor, []
        loaded: dict[int, array[int]] = defaultdict(partial(array, 'q'))
        for id, offset in lines:
            pairs = loaded[(id * factor & _MASK) >> _SHIFT]
            pairs.append(id)
            pairs.append(offset)
        while loaded:
            number, pairs = loaded.popitem()
            firsts: dict[int, int] = {}  # by their ids, which are sorted
            for id, offset in sorted(zip(pairs[::2], pairs[1::2], strict=True)):
                if (first := firsts.setdefault(id, offset)) != offset:
                    repeats.append((id, first, offset))
            self._partitions[number] = array('q', [*firsts, *firsts.values()])
        return repeats
