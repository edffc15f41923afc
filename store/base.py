"""The contract between the service and a store of plants."""

import abc
import json
import re
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from store.errors import IdTaken

ID_MIN = -(2**63)
ID_MAX = 2**63 - 1
# A batch is one write, and may be unsynced at a crash, or one statement, with a time
# limit. A crowd of large plants must not make a small one slow.
BATCH_PLANTS = 1000
BATCH_SIZE = 2**20  # in bytes of a file, or characters in a database


class Plant(NamedTuple):
    """One plant, as it was sent and as it is stored.

    A new member is added here, with the default ``None``, and in
    ``schemas/Plant.json``. All else follows from ``Plant._fields``.
    """

    id: int  # signed, of 64 bits, unique in a store
    name: str  # any text without U+0000 and lone surrogates, also empty
    tag: str | None = None  # the same, or None if the plant has no tag

    def length(self) -> int:
        """Return how many characters the texts have."""
        return sum([len(text or '') for text in self[1:]])


TEXTS = Plant._fields[1:]  # the members that are text
OPTIONAL = frozenset(Plant._field_defaults)  # those that a plant may lack: None
LONE_SURROGATE = re.compile('[\ud800-\udfff]')
Item = TypeVar('Item')
# NOTE: prebuilt, since json.dumps() with arguments builds an encoder at each call.
to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def check_plant(plant: Plant) -> None:
    """Raise ``ValueError`` with a sentence about what no store can keep.

    A file would not open again with ``Plant(True, ...)`` in it, and PostgreSQL refuses
    U+0000. A file also limits the length.
    """
    id = plant.id
    if not isinstance(id, int) or isinstance(id, bool):
        raise ValueError(f'id: {reprlib.repr(id)} is not an integer')
    if not ID_MIN <= id <= ID_MAX:
        raise ValueError('id: it is not a 64-bit integer')
    for member, text in zip(TEXTS, plant[1:]):
        if text is None and member in OPTIONAL:
            continue
        if not isinstance(text, str):
            raise ValueError(f'{member}: {reprlib.repr(text)} is not a string')
        if '\0' in text:
            raise ValueError(f'{member}: it holds U+0000')
        if not text.isascii() and LONE_SURROGATE.search(text):
            raise ValueError(f'{member}: it holds a lone surrogate')


def batches(
    items: Iterable[Item], size: Callable[[Item], int] = attrgetter('size')
) -> Generator[list[Item]]:
    """Split items into batches: of at most ``BATCH_SIZE``, or of one item."""
    batch: list[Item] = []
    total = 0
    for item in items:
        total += (own := size(item))
        if batch and (len(batch) == BATCH_PLANTS or total > BATCH_SIZE):
            yield batch
            batch, total = [], own
        batch.append(item)
    if batch:
        yield batch


class PlantStore(AbstractContextManager['PlantStore', None]):
    """A store of plants: ``add``, ``__iter__``, ``ping``, ``load`` and ``close``.

    Every store keeps these promises; ``tests/store/contract.py`` quotes them:

    1. When ``add`` returns, the plant is durable to the degree that the class
       documents. This also holds when the very same plant was there before.
    2. When ``add`` raises ``IdTaken``, a different plant holds that id and the store
       is unchanged.
    3. When ``add`` raises ``StoreUnavailable``, the plant may or may not be there
       afterwards, never half of it: repeat the call.
    4. ``add`` may be called from many threads at once, and, for every store but the
       one in memory, from many processes.
    5. Iteration yields every plant that was added before it began, each once, in no
       promised order, exactly as it was given; or it raises.
    6. ``ping`` returns if an ``add`` would work now; otherwise it raises what the
       ``add`` would raise.
    7. After ``close`` every new use of the plants raises ``StoreClosed``; ``close`` may
       be called again.
    8. Each process opens a store at its first use. So a store that was made before a
       fork works after it.
    9. ``add`` and ``add_many`` raise ``ValueError`` if ``check_plant`` does, before
       anything is stored.
    10. A caller may be interrupted at any moment, by Ctrl-C or a killed greenlet. Its
       plant is then stored or not, never half of it, and others go on.
    """

    # Called after each sync of a batch, with the number of its adds and the time of the
    # sync in seconds; it must not raise. A store without batches ignores it.
    on_sync: Callable[[int, float], None] | None = None

    @abc.abstractmethod
    def add(self, plant: Plant) -> bool:
        """Store a plant, in 5 seconds at most; return whether it was not there."""

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        """Store plants, each as ``add`` would, however long that takes.

        Return for each what ``add`` would return, or the ``IdTaken`` it would raise.
        Any other ``StoreError`` ends it; then any of the plants may be stored.
        """
        for plant in (plants := [*plants]):  # an iterator, too, counts once
            check_plant(plant)
        outcomes: list[bool | IdTaken] = []
        for plant in plants:
            try:
                outcomes.append(self.add(plant))
            except IdTaken as ex:
                outcomes.append(ex)
        return outcomes

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Plant]:
        """Yield all plants."""

    @abc.abstractmethod
    def ping(self) -> None:
        """Return if an ``add`` would work now."""

    def load(self) -> None:
        """Read what forked children can go on with; keep nothing open.

        A server calls it once, in its master, on a store that nobody uses yet: it waits
        as long as it takes, and otherwise raises what an ``add`` would raise.
        """
        self.ping()

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the store holds; it may be called twice."""

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Entry:
    """A plant on its way into the store."""

    item: Any  # made by ``CommittedStore._record``
    size: int  # in bytes, or in characters
    # Set by ``Backend.append``, or by the function that it returns.
    new: bool = False
    error: Exception | None = None


class Backend(Protocol):
    """The open part of a store, used by the committer alone."""

    def append(self, batch: Sequence[Entry]) -> Callable[[], object] | None:
        """Store plants; return the function that makes them durable, if any.

        What either raises reaches all callers, the ``error`` of an entry one of them.
        """

    def ping(self) -> None: ...
    def close(self) -> None: ...  # releases everything, also if it raises
