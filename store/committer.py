"""Group commit: plants that wait together are stored and made durable together.

A caller puts a call into a queue and waits. The *committer*, one thread of the store in
each process, takes the calls that wait as one *batch*, appends their plants, makes them
durable with one sync, and wakes the callers; then it takes the next. All that is
critical happens in this thread: it also opens the store, answers pings, and closes.
A caller does none of it, since it may be interrupted between any two instructions: its
call then leaves the queue, unless a batch has it. (In a load nobody waits.)

**The committer outlives every exception.** What is raised while a batch is served is
the outcome of its calls. Whatever else is raised, for want of memory, ends the thread;
the next caller, or one that looks after its call, starts another one, which refuses the
calls that the last one had, and goes on with the queue.

**Where syncs are slow the committer gathers.** The callers that it wakes come back a
moment later. A batch that began without them would split the crowd into groups that
wait for each other's syncs. So it waits until as many call as it has woken and as
waited already, but at most for as long as that sync, or 20 ms. Where syncs are quick
(below 1.5 ms) the thread switches are the cost.
"""

import abc
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter, sleep
from typing import Any

from store import base, forks
from store.base import Backend, Entry, Plant, PlantStore, batches, check_plant
from store.errors import IdTaken, StoreClosed, StoreError, StoreUnavailable
from store.scheduler import THREADS, Scheduler, Wake

log = logging.getLogger(__name__)

# Seconds. A lock or a database gives up earlier, so that the callers hear its reason.
WAIT_WITHIN = 5.0
LOOK_EVERY = 1.0  # a caller that waits looks what has become of its call
CLOSE_WITHIN = 5.0  # a write that hangs keeps its files open until it ends
INTERRUPTED = 'the write was interrupted'


class CommittedStore(PlantStore):
    """A store with a committer, which opens it when a process first uses it.

    A committer belongs to one process: after a fork its thread does not exist, and a
    lock that was held stays held. ``shown`` is the name of the store in errors.
    """

    gather_above = 0.001_5  # seconds; only after a sync that took longer
    gather_within = 0.02  # seconds; a disk that stalled once may take seconds

    def __init__(self, shown: str, *, scheduler: Scheduler = THREADS) -> None:
        self._shown = shown
        self._scheduler = scheduler
        self._closed = False
        self._committers: dict[int, _Committer] = {}  # by ``forks.generation``

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
        each = (Entry(*self._record(plant)) for plant in plants)
        for entries in batches(each, lambda entry: entry.size):
            committer.submit(entries, within=inf)
            for entry in entries:
                if entry.error is not None and not isinstance(entry.error, IdTaken):
                    raise entry.error
                outcomes.append(entry.error or entry.new)
        return outcomes

    def ping(self) -> None:
        self._committer().submit(())  # all callers that wait share one

    def load(self) -> None:
        self._check_open()
        with closing(self._open_backend()) as backend:
            backend.ping()

    def close(self) -> None:
        self._closed = True
        if committer := self._committers.get(forks.generation):
            committer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed

    def _committer(self) -> '_Committer':
        self._check_open()
        process, each = forks.generation, self._committers
        return each.get(process) or each.setdefault(process, _Committer(self))  # atomic


@dataclass(slots=True, eq=False)
class _Call:
    """What one caller waits for, and its outcome."""

    entries: Sequence[Entry]  # its plants; without any it is a ping
    size: int
    wake: Wake
    error: Exception | None = None
    has_ended: bool = False  # set last, before the wake, which an interrupt may cost


class _Committer:
    """The queue of a store in one process, and the thread that serves it."""

    def __init__(self, store: CommittedStore) -> None:
        self._store = store
        self._backend: Backend | None = None
        self._queue: deque[_Call] = deque()
        self._batch: list[_Call] = []  # taken from the queue, and without an outcome
        # When a batch last failed, and why; until one succeeds.
        self._failure: tuple[float, StoreError | None] = 0.0, None
        self._crowd = 0  # how many calls the next batch waits for, and until when
        self._gather_until = 0.0
        self._bell = store._scheduler.allocate_lock()  # released when calls wait
        self._bell.acquire()
        self._running = store._scheduler.allocate_lock()  # held by the thread
        # One wake for all: then they come back together, and share the next batch.
        wake: Wake = lambda calls: [call.wake() for call in calls]  # noqa: E731
        self._ring_soon, self._wake = store._scheduler.connect(self._ring, wake)

    # Methods of the callers, which may be interrupted anywhere.
    def submit(self, entries: Sequence[Entry], *, within: float | None = None) -> None:
        """Return within some seconds, when each entry is durable or has an error."""
        wait, wake = self._store._scheduler.waiter()
        call = _Call(entries, sum([entry.size for entry in entries]), wake)
        began = perf_counter()
        deadline = began + (WAIT_WITHIN if within is None else within)
        try:
            self._queue.append(call)
            self._start_thread()
            self._ring_soon()
            if self._store._closed:  # perhaps since then: no batch takes it
                raise StoreClosed
            while not (wait(min(deadline - began, LOOK_EVERY)) or call.has_ended):
                self._look_after(began, deadline)
            if call.error is not None:  # without a traceback that grows with each raise
                raise call.error.with_traceback(None)
        except BaseException:
            with suppress(ValueError):  # a batch has it
                self._queue.remove(call)
            raise

    def _look_after(self, began: float, deadline: float) -> None:
        """Have a call served that waits for long, or raise why it has to end."""
        self._start_thread()  # the last one may have ended with an exception
        self._ring()  # what should have rung may have been interrupted
        failed_at, failure = self._failure
        # An older one says nothing about this call; a bulk add waits for its own.
        if failure is not None and began < failed_at and deadline < inf:
            raise failure.with_traceback(None)
        if perf_counter() >= deadline:
            state = 'did not answer in time' if self._backend else 'is being opened'
            raise StoreUnavailable(f'the store {state}', store=self._store._shown)

    def _start_thread(self) -> None:
        if not self._running.locked():
            try:
                self._store._scheduler.start_thread(self._run, ())
            except RuntimeError as ex:
                raise StoreUnavailable(f'no thread can be started: {ex}') from ex

    def close(self) -> None:
        """End the thread of a closed store, and wait for that."""
        self._ring()
        until = perf_counter() + CLOSE_WITHIN
        while self._running.locked() and perf_counter() < until:
            sleep(0.001)  # not acquire(): who is interrupted could keep the lock
        if not self._running.locked():  # perhaps an exception had ended it
            self._close_backend()

    def _close_backend(self) -> None:
        with suppress(Exception):
            if self._backend is not None:
                self._backend.close()

    def _ring(self) -> None:
        if len(self._queue) >= self._crowd or self._store._closed:
            with suppress(RuntimeError):  # it rings already
                self._bell.release()

    # What follows is of the thread, which no caller interrupts.
    def _run(self) -> None:
        try:
            if not self._running.locked():  # no other caller was faster
                with self._running:
                    self._serve()
        except BaseException:  # for want of memory, between two batches
            pass  # another thread goes on: see ``_look_after``

    def _serve(self) -> None:
        """Serve batches until the store is closed."""
        self._end_batch(StoreUnavailable(INTERRUPTED))  # of a thread that has ended
        while not self._store._closed or self._queue:
            self._gather()
            self._take_batch()
            try:
                self._store._check_open()  # or refuse all who still wait
                self._commit()
            except BaseException as ex:
                self._fail(self._batch, ex)
            self._end_batch()
        self._close_backend()

    def _gather(self) -> None:
        """Wait for calls: after a slow sync for a crowd, for some milliseconds."""
        while len(self._queue) < self._crowd:
            left = self._gather_until - perf_counter()
            if left <= 0 or not self._bell.acquire(timeout=left):
                break
        self._crowd = 0  # before a look at the queue: from here on each call rings
        while not (self._queue or self._store._closed):
            self._bell.acquire()

    def _take_batch(self) -> None:
        """Move calls from the queue into the batch, as many as one write may have."""
        total = 0
        with suppress(IndexError, ValueError):  # no call is left, or one has just left
            while not self._batch or total + self._queue[0].size <= base.BATCH_SIZE:
                call = self._queue[0]
                total += call.size
                self._batch.append(call)  # first: whatever happens, it has a place
                self._queue.remove(call)

    def _commit(self) -> None:
        """Serve the calls of the batch: the adds, then the pings."""
        took, adds = 0.0, [call for call in self._batch if call.entries]
        pings = [call for call in self._batch if not call.entries]
        for calls in filter(None, (adds, pings)):
            try:
                if self._backend is None:
                    self._backend = self._store._open_backend()
                if calls is adds:
                    took = self._append(self._backend, calls)
                else:
                    self._backend.ping()
                self._failure = 0.0, None
            except BaseException as ex:
                self._fail(calls, ex)
        self._gather_until = perf_counter() + min(took, self._store.gather_within)
        if took > self._store.gather_above:  # counted before the first comes back
            self._crowd = len(self._batch) + len(self._queue)

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
        """Give calls an error as their outcome."""
        if not isinstance(error, StoreError):  # want of memory, or a fault of ours
            log.error('%s: %s', self._store._shown, INTERRUPTED, exc_info=error)
            shown = {'store': self._store._shown, 'detail': repr(error)}
            error = StoreUnavailable(INTERRUPTED, **shown)
        self._failure = perf_counter(), error
        for call in calls:  # also if an entry has one, which may rest on another entry
            call.error = error

    def _end_batch(self, error: Exception | None = None) -> None:
        """Wake the callers of the batch; with ``error`` if they have no outcome."""
        for call in self._batch:
            if not call.has_ended:
                call.error = call.error or error
                call.has_ended = True
        batch, self._batch = self._batch, []
        if batch:
            self._wake(batch)
