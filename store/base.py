"""The contract between the service and a store of plants."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

from store.errors import IdTaken

Create = Literal['always', 'first', 'never']

Item = TypeVar('Item')


class Plant(NamedTuple):
    """One plant, as it was sent and as it is stored.

    Attributes:
        id: A signed 64-bit integer, unique in a store.
        name: Any text without U+0000 and lone surrogates, also empty.
        tag: The same, or ``None`` if the plant has no tag.
    """

    id: int
    name: str
    tag: str | None = None


class Progress(Protocol):
    """Shows how far a store is read; yields the items that it is given."""

    def __call__(self, items: Iterable[Item], /) -> Iterable[Item]: ...


class Verified(NamedTuple):
    """The result of reading every plant of a store.

    Attributes:
        plants: The number of sound plants.
        damaged: A sentence for each line that is not a plant, or has the id of an
            earlier plant.
        side_file: The file that these lines were moved to, if they were moved.
    """

    plants: int
    damaged: tuple[str, ...] = ()
    side_file: str | None = None


class PlantStore(abc.ABC):
    """A store of plants.

    Every store keeps these promises; the tests in ``store/testing.py`` quote them:

    1. When ``add`` returns, the plant is durable to the degree that the class
       documents. This also holds when the very same plant was there before.
    2. When ``add`` raises ``IdTaken``, a different plant holds that id and the store
       is unchanged.
    3. When ``add`` raises ``StoreUnavailable``, the plant may or may not be there
       afterwards, never half of it: repeat the call.
    4. ``add`` may be called from many threads at once, and, for every store but the
       one in memory, from many processes.
    5. Iteration yields every plant that was added before it began, each once, in no
       promised order, exactly as it was given.
    6. ``ping`` returns if an ``add`` would work now; otherwise it raises what the
       ``add`` would raise.
    7. After ``close`` every use of the plants raises ``StoreClosed``; ``close`` may
       be called again.
    8. Making a store opens nothing; it opens in the process that first uses it. So a
       store that was made before a fork works after it.

    Attributes:
        can_repair: Whether ``verify`` can move damage out of the store.
    """

    can_repair: ClassVar[bool] = False

    @abc.abstractmethod
    def add(self, plant: Plant) -> bool:
        """Store a plant, once.

        Returns:
            Whether it is new: ``False`` if this very plant was there before.

        Raises:
            IdTaken: A different plant holds the id.
            StoreUnavailable: The store cannot take plants now.
            StoreCorrupt: The stored plants cannot be read.
            StoreClosed: ``close`` was called.
        """

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        """Store plants, each as ``add`` would; in one batch, if the store can do that.

        Returns:
            For each plant what ``add`` would return, or the ``IdTaken`` it would raise.

        Raises:
            StoreError: As ``add``, except ``IdTaken``; then any of the plants may be
                stored.
        """
        outcomes: list[bool | IdTaken] = []
        for plant in plants:
            try:
                outcomes.append(self.add(plant))
            except IdTaken as ex:
                outcomes.append(ex)
        return outcomes

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Plant]:
        """Yield all plants; raises as ``add`` does, except ``IdTaken``."""

    def size_hint(self) -> int:
        """Return the approximate number of plants, or 0 if it is not known."""
        return 0

    def verify(self, *, repair: bool = False, progress: Progress = iter) -> Verified:
        """Read every plant; raises as ``add`` does, except ``IdTaken``.

        Args:
            repair: Move damaged lines to a side file; only if ``can_repair``.
            progress: Shows how far the store is read.
        """
        return Verified(sum(1 for _ in progress(self)))

    @abc.abstractmethod
    def ping(self) -> None:
        """Return if an ``add`` would work now; raises as ``add`` does if not."""

    def check_opening(self) -> None:
        """Return if the store would open, changing nothing; raises as ``add`` does.

        The default opens the store. Override it if opening changes anything.
        """
        self.ping()

    def observe_syncs(  # noqa: B027 - not every store syncs batches
        self, observer: Callable[[int, float], None]
    ) -> None:
        """Call an observer after each sync of a batch; there may be several observers.

        Args:
            observer: Called with the number of plants and the time of the sync in
                seconds; it must not raise.
        """

    def pin(self) -> None:  # noqa: B027 - most stores have nothing to pin
        """Fix which file or place this store uses, also in processes forked later.

        A pinned store never makes a missing file, and refuses another file in its
        place. This method opens nothing and waits for no lock.

        Raises:
            StoreUnavailable: The file or place does not exist.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the store holds; it may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
