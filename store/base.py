"""The contract between the service and a store of plants."""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import ClassVar
from typing import Literal
from typing import NamedTuple
from typing import Protocol
from typing import Self
from typing import TypeVar

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
    """Watches how far a store is read: yields the items that it is given."""

    def __call__(self, items: Iterable[Item], /) -> Iterable[Item]: ...


class Verified(NamedTuple):
    """What reading every plant of a store has found.

    Attributes:
        plants: How many sound plants there are.
        damaged: A sentence for each thing that is not a plant, or whose id an earlier
            plant has.
        side_file: Where that was moved to, if it was.
    """

    plants: int
    damaged: tuple[str, ...] = ()
    side_file: str | None = None


class PlantStore(abc.ABC):
    """Keeps plants.

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
    6. ``ping`` returns if an ``add`` would work now and raises what it would raise
       if not.
    7. After ``close`` whatever uses the plants raises ``StoreClosed``; ``close`` may
       be called again.
    8. Making a store touches nothing; it opens in the process that first uses it. So
       a store that was made before a fork works after it.

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
            StoreCorrupt: What is stored cannot be read.
            StoreClosed: ``close`` was called.
        """

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        """Store plants, each as ``add`` would; together, where the store can do that.

        Returns:
            For each plant what ``add`` would return, or the ``IdTaken`` it would raise.

        Raises:
            StoreError: As ``add``, ``IdTaken`` excepted; any of them may be there then.
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
        """Yield all plants; raises as ``add`` does, ``IdTaken`` excepted."""

    def size_hint(self) -> int:
        """Return about how many plants there are, 0 if that is not known."""
        return 0

    def verify(self, *, repair: bool = False, progress: Progress = iter) -> Verified:
        """Read every plant; raises as ``add`` does, ``IdTaken`` excepted.

        Args:
            repair: Move what is damaged to a side file; only if ``can_repair``.
            progress: Watches how far it is.
        """
        return Verified(sum(1 for _ in progress(self)))

    @abc.abstractmethod
    def ping(self) -> None:
        """Return if an ``add`` would work now; raises as ``add`` does if not."""

    def check_opening(self) -> None:
        """Return if the store would open, changing nothing; raises as ``add`` does.

        This one opens the store: enough where opening changes nothing.
        """
        self.ping()

    def observe_syncs(  # noqa: B027 - not every store syncs batches
        self, observer: Callable[[int, float], None]
    ) -> None:
        """Have an observer called after each sync of a batch; there may be several.

        Args:
            observer: Called with the number of plants and the time in seconds; it must
                not raise.
        """

    def pin(self) -> None:  # noqa: B027 - most stores have nothing to fix
        """Fix which file, or place, this store is, also in processes forked later.

        A pinned store never makes a missing file, and refuses another in its place.
        Nothing is opened, and no lock is waited for.

        Raises:
            StoreUnavailable: There is no such place.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the store holds; it may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
