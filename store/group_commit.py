"""Group commit: records that wait together are written and synced together.

A caller puts its record into a queue and waits. A *committer*, a thread of the store,
takes all records that wait as one *batch*, appends and syncs it, and wakes the callers.
No caller writes or syncs, since it may be interrupted between any two instructions. If
a caller leaves, its record leaves the queue, unless a batch has the record already.

One committer has the *turn*: it takes batches and appends them. A sync covers all that
was written before it began, so syncs may overlap. Whether the committer keeps the turn
during its sync depends on how long the latest sync took:

* Where syncs are quick (tens of microseconds), the system calls and thread switches
  around them are the cost. So the committer keeps the turn, and the next batch grows.
* Where syncs are slow (milliseconds), a record that just misses a batch would wait for
  two. So another committer gets the turn: syncs overlap, and the disk groups them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, TypeVar

from store.errors import StoreClosed, StoreUnavailable
from store.scheduler import Scheduler, Wake

Item = TypeVar('Item')
Sync = Callable[[], object]

# Seconds. A lock or a database gives up earlier, so that the callers hear its reason.
WAIT_WITHIN = 5.0
# A sync that takes longer than this, in seconds, is worth overlapping with others.
SLOW_SYNC = 0.000_5
SLOW_SYNCS_IN_FLIGHT = 4
# The size of a full batch: a crowd of large records must not make a small one slow.
BATCH_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False, repr=False)
class Entry(Generic[Item]):
    """A record on its way to the disk; equal only to itself."""

    item: Item
    size: int  # in bytes
    # Set by the append or the sync: what submit() returns, or raises.
    new: bool = False
    error: BaseException | None = None
    wake: Wake = field(init=False)  # set by submit()


class GroupCommit(Generic[Item]):
    """Turn concurrent calls of ``submit`` into batches.

    Args:
        scheduler: How the callers wait.
        append: Called with a batch, one call at a time, in a thread; it writes the
            records and returns a function that makes them durable, or ``None`` if there
            is nothing to sync. What either raises reaches every caller of the batch, as
            ``StoreUnavailable`` if it is no ``Exception``. Both may set the ``error``
            of an entry instead.
        observe: Called before the callers return, as ``PlantStore.on_sync``.
        late: Makes the error of a caller that waits too long, if no batch has failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        append: Callable[[Sequence[Entry[Item]]], Sync | None],
        *,
        observe: Callable[[int, float], None],
        late: Callable[[], StoreUnavailable],
    ) -> None:
        self._append = append
        self._scheduler = scheduler
        self._observe = observe
        self._late = late
        self._failure: StoreUnavailable | None = None  # until one succeeds
        self._waiting: deque[Entry[Item]] = deque()
        self._closed = False
        self._bell = scheduler.lock()  # released when records wait
        self._bell.acquire()
        self._ring_soon = scheduler.gathered(self._ring)
        self._turn = scheduler.lock()
        self._is_slow = False  # the latest sync
        # One for each committer that may still start; a pop is atomic.
        self._places = [None] * SLOW_SYNCS_IN_FLIGHT

    # Methods of the callers, which may be interrupted anywhere.

    def submit(self, item: Item, size: int) -> bool:
        """Return the ``new`` of a record when it is durable, or raise its ``error``."""
        entry = Entry(item, size)
        wait, entry.wake = self._scheduler.waiter()
        try:
            if len(self._places) == SLOW_SYNCS_IN_FLIGHT:  # there is no committer
                self._start_committer()
            self._waiting.append(entry)
            self._ring_soon()
            if self._closed:  # perhaps since the append: no batch takes it
                raise StoreClosed
            if not wait(WAIT_WITHIN):
                # Without the traceback that it has, or it would grow with each caller.
                raise (self._failure or self._late()).with_traceback(None)
        except BaseException:
            with suppress(ValueError):  # a batch has it
                self._waiting.remove(entry)
            raise
        if entry.error is not None:
            raise entry.error
        return entry.new

    def _start_committer(self) -> None:
        try:
            self._scheduler.start(self._commit_batches)
        except RuntimeError as ex:
            raise StoreUnavailable(f'no thread can be started: {ex}') from ex

    # Methods of the threads of the store, which nothing interrupts.

    def close(self) -> None:
        """Refuse all records that no batch has, and tell the committers to end."""
        self._closed = True
        with suppress(IndexError):
            while True:
                entry = self._waiting.popleft()
                entry.error = StoreClosed()
                entry.wake()
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _commit_batches(self) -> None:
        """Run as a committer until ``close``, or return if there are enough."""
        try:
            self._places.pop()
        except IndexError:
            return
        self._turn.acquire()
        while batch := self._take_batch():
            sync = None
            try:
                sync = self._append(batch)
                if sync is None:
                    self._failure = None
            except BaseException as ex:
                self._fail(batch, ex)
            if shares_turn := sync is not None and self._is_slow:
                if self._places:
                    with suppress(StoreUnavailable):  # the other committers suffice
                        self._start_committer()
                self._turn.release()
            if sync is not None:
                self._sync(batch, sync)
            for entry in batch:
                entry.wake()
            if shares_turn:
                self._turn.acquire()
        self._turn.release()

    def _take_batch(self) -> list[Entry[Item]]:
        """Return the records that wait, when there are some; none after ``close``."""
        batch: list[Entry[Item]] = []
        size = 0
        while not batch and not self._closed:
            self._bell.acquire()
            with suppress(IndexError):
                while size < BATCH_BYTES:
                    batch.append(self._waiting.popleft())
                    size += batch[-1].size
        if self._waiting or self._closed:
            self._ring()  # for the next batch, or the next committer
        return batch

    def _sync(self, batch: Sequence[Entry[Item]], sync: Sync) -> None:
        began, failed = perf_counter(), False
        try:
            sync()
            self._failure = None
        except BaseException as ex:
            self._fail(batch, ex)
            failed = True
        took = perf_counter() - began
        # A quick failure must not make the next batches wait for a slow sync.
        self._is_slow = failed or took > SLOW_SYNC
        with suppress(Exception):  # it should raise none
            self._observe(len(batch), took)

    def _fail(self, batch: Sequence[Entry[Item]], error: BaseException) -> None:
        if not isinstance(error, Exception):  # it would end the thread of each caller
            error = StoreUnavailable(f'the write was interrupted: {error!r}')
        if isinstance(error, StoreUnavailable):
            self._failure = error
        # This replaces an error that the append has set: it may have compared a record
        # with another one of this very batch, which is now not stored.
        for entry in batch:
            entry.error = error
