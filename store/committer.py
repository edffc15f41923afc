"""Group commit: plants that wait together are stored and made durable together.

A caller puts a call into a queue and waits. The *committer*, one thread of the store in
each process, takes the calls that wait as one *batch*, appends their plants, makes them
durable with one sync, and wakes the callers; then it takes the next. All that is
critical happens in this thread: it also opens the store, answers pings, and closes.
A caller does none of it, since it may be interrupted between any two instructions. (In
a load nobody waits.) If it leaves, its call leaves the queue, unless a batch has it.

**Where syncs are slow the committer gathers.** The callers that it wakes come back with
their next plants a moment later. A batch that began without them would make them wait
for two syncs, and the crowd would stay split into groups that wait for each other. So
after a slow sync the committer waits until as many callers wait as it has woken and as
waited already, but at most for as long as that sync, or 20 ms. Where syncs are quick
(below 1.5 ms) it does not: there the thread switches are the cost.
"""

import _thread
import abc
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from time import perf_counter, sleep
from typing import Any, Protocol

from store.base import Plant, PlantStore, batches, check_plant
from store.errors import IdTaken, StoreClosed, StoreUnavailable
from store.scheduler import THREADS, Scheduler, Wake

# Seconds. A lock or a database gives up earlier, so that the callers hear its reason.
WAIT_WITHIN = 5.0
OUTAGE_WITHIN = 1.0  # who waits looks so often whether a batch has failed or ended
CLOSE_WITHIN = 5.0  # a write that hangs keeps its files open until it ends
BATCH_BYTES = 1024 * 1024  # a crowd of large plants must not make a small one slow


@dataclass(slots=True, eq=False)
class Entry:
    """A plant on its way into the store."""

    item: Any  # made by ``CommittedStore._record``
    size: int  # in bytes
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


class CommittedStore(PlantStore):
    """A store with a committer, which opens it when a process first uses it.

    A child uses no committer of its parent: after a fork that thread does not exist,
    and a lock that was held stays held. So a committer belongs to a process id.
    ``shown`` is the name of the store in errors.
    """

    gather_above = 0.001_5  # seconds; only after a sync that took longer
    gather_within = 0.02  # seconds; a disk that stalled once may take seconds

    def __init__(self, shown: str, *, scheduler: Scheduler = THREADS) -> None:
        self._shown = shown
        self._scheduler = scheduler
        self._closed = False
        self._committers: dict[int, _Committer] = {}  # by process id

    @abc.abstractmethod
    def _open_backend(self) -> Backend:
        """Open the backend; called again at the next use if it raises."""

    @abc.abstractmethod
    def _record(self, plant: Plant) -> tuple[Any, int]:
        """Return the item of a plant for ``Backend.append``, and its size in bytes."""

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        entry = Entry(*self._record(plant))
        self._committer().submit((entry,))
        if entry.error is not None:
            raise entry.error
        return entry.new

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        for plant in plants:
            check_plant(plant)
        outcomes: list[bool | IdTaken] = []
        committer = self._committer()
        for batch in batches(plants):
            entries = [Entry(*self._record(plant)) for plant in batch]
            committer.submit(entries, within=TIMEOUT_MAX)
            for entry in entries:
                if entry.error is not None and not isinstance(entry.error, IdTaken):
                    raise entry.error
                outcomes.append(entry.error or entry.new)
        return outcomes

    def ping(self) -> None:
        # All callers that wait share one, which has not begun before they called.
        self._committer().submit(())

    def load(self, *, wait: bool = True) -> None:
        self._check_open()
        if wait:
            with closing(self._open_backend()) as backend:
                backend.ping()

    def close(self) -> None:
        self._closed = True
        if committer := self._committers.get(os.getpid()):
            committer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed

    def _committer(self) -> '_Committer':
        self._check_open()
        pid, each = os.getpid(), self._committers
        return each.get(pid) or each.setdefault(pid, _Committer(self))  # atomic


@dataclass(slots=True, eq=False)
class _Call:
    """What one caller waits for: its plants, or without any a ping."""

    entries: Sequence[Entry]
    wake: Wake
    is_done: bool = False  # set before the wake, which an interrupt may cost
    error: BaseException | None = None


class _Committer:
    """The queue of a store in one process, and the thread that serves it."""

    def __init__(self, store: CommittedStore) -> None:
        self._store = store
        self._backend: Backend | None = None
        self._waiting: deque[_Call] = deque()
        self._bell = _thread.allocate_lock()  # released when calls wait
        self._bell.acquire()
        # One wake for all: then they come back together, and share the next batch.
        self._ring_soon, self._wake = store._scheduler.connect(
            self._ring, lambda calls: [call.wake() for call in calls]
        )
        self._running = _thread.allocate_lock()  # held by the thread alone
        self._failure: StoreUnavailable | None = None  # until a call succeeds
        self._crowd = 0  # how many callers the next batch waits for, and until when
        self._gather_until = 0.0

    # Methods of the callers, which may be interrupted anywhere.
    def submit(self, entries: Sequence[Entry], *, within: float = WAIT_WITHIN) -> None:
        """Return within some seconds, when each entry is durable or has an error."""
        wait, wake = self._store._scheduler.waiter()
        call = _Call(entries, wake)
        try:
            if not self._running.locked():
                try:
                    _thread.start_new_thread(self._run, ())
                except RuntimeError as ex:
                    raise StoreUnavailable(f'no thread can be started: {ex}') from ex
            self._waiting.append(call)
            self._ring_soon()
            if self._store._closed:  # perhaps since then: no batch takes it
                raise StoreClosed
            while not (wait(min(within, OUTAGE_WITHIN)) or call.is_done):
                self._ring()  # what should have rung may have been interrupted
                within -= OUTAGE_WITHIN
                state = 'did not answer in time' if self._backend else 'is being opened'
                late = StoreUnavailable(f'the store {state}', store=self._store._shown)
                if (self._failure and within < WAIT_WITHIN) or within <= 0:  # not bulk
                    raise (self._failure or late).with_traceback(None)
            if call.error is not None:
                # Its traceback would grow with each caller that raises it.
                raise call.error.with_traceback(None)
        except BaseException:
            with suppress(ValueError):  # a batch has it
                self._waiting.remove(call)
            raise

    def close(self) -> None:
        """End the thread of a closed store, and wait for that."""
        self._ring()
        until = perf_counter() + CLOSE_WITHIN
        while self._running.locked() and perf_counter() < until:
            sleep(0.001)  # not acquire(): who is interrupted could keep the lock

    def _ring(self) -> None:
        if len(self._waiting) >= self._crowd or self._store._closed:
            with suppress(RuntimeError):  # it rings already
                self._bell.release()

    # Methods of the thread, which nothing interrupts.
    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # another caller was faster
        while batch := self._take_batch():
            try:
                self._store._check_open()  # or refuse all who still wait
                self._commit(batch)
            except BaseException as ex:  # or for want of memory: nobody else would wake
                self._fail(batch, ex)
            for call in batch:
                call.is_done = True
            self._wake(batch)
        if self._backend is not None:
            with suppress(Exception):
                self._backend.close()
        self._running.release()

    def _take_batch(self) -> list[_Call]:
        """Return calls that wait, when there are some; none only after ``close``."""
        while len(self._waiting) < self._crowd:
            left = self._gather_until - perf_counter()
            if left <= 0 or not self._bell.acquire(timeout=left):
                break
        self._crowd = 0  # before a look at the queue: from here on each call rings
        batch: list[_Call] = []
        size = 0
        while not batch and (self._waiting or not self._store._closed):
            if not self._waiting:
                self._bell.acquire()
            with suppress(IndexError):
                while size < BATCH_BYTES:
                    batch.append(self._waiting.popleft())
                    size += sum([entry.size for entry in batch[-1].entries])
        return batch

    def _commit(self, batch: Sequence[_Call]) -> None:
        pings = [call for call in batch if not call.entries]
        adds = [call for call in batch if call.entries]
        took = 0.0
        for calls in filter(None, (adds, pings)):
            try:
                if self._backend is None:
                    self._backend = self._store._open_backend()
                if calls is adds:
                    took = self._append(self._backend, calls)
                else:
                    self._backend.ping()
                self._failure = None
            except BaseException as ex:
                self._fail(calls, ex)
        # Counted before anybody is woken: the first come back before the last is woken.
        is_slow = took > self._store.gather_above
        self._crowd = len(batch) + len(self._waiting) if is_slow else 0
        self._gather_until = perf_counter() + min(took, self._store.gather_within)

    def _append(self, backend: Backend, calls: Sequence[_Call]) -> float:
        """Store the plants of some calls; return how long the sync took."""
        entries = [entry for call in calls for entry in call.entries]
        if (sync := backend.append(entries)) is None:
            return 0.0
        began = perf_counter()
        sync()
        took = perf_counter() - began
        if self._store.on_sync is not None:
            with suppress(Exception):  # it should raise none
                self._store.on_sync(len(entries), took)
        return took

    def _fail(self, calls: Sequence[_Call], error: BaseException) -> None:
        if not isinstance(error, Exception):  # it would end the thread of each caller
            error = StoreUnavailable(f'the write was interrupted: {error!r}')
        if isinstance(error, StoreUnavailable):
            self._failure = error
        # It also hides the error of an entry, which may rest on another entry of this
        # very batch, which is now not stored.
        for call in calls:
            call.error = error
