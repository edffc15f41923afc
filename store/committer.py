"""Group commit: plants that wait together are stored and made durable together.

A caller leaves a call and waits. The *committer*, one thread of the store in each
process, takes the calls that wait as one *batch*, appends their plants, makes them
durable with one sync, and wakes the callers; then it takes the next. All that is
critical happens in this thread: it also opens the store, answers pings, and closes.
A caller does none of it, since it may be interrupted between any two instructions: it
takes its call away, and nothing else. (``load`` opens in its caller: no other waits.)

**The committer outlives every exception.** What is raised while a batch is served is
the outcome of its calls. Whatever else is raised, for want of memory, ends the thread;
the next caller, or one that looks after its call, starts another one. A call stays in
its place until it has an outcome, so the new thread serves what the last one had: to
store a plant again changes nothing.

**Where a sync takes more than 1.5 ms the committer gathers.** The callers that it wakes
come back a moment later. A batch that began without them would split the crowd into
groups that wait for each other's syncs. So it waits until as many call as it has woken
and as waited already, but at most for as long as that sync, or 20 ms.
"""

import abc
import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter, sleep
from typing import Any

from store import forks
from store.base import Backend, Entry, Plant, PlantStore, batches, check_plant
from store.errors import IdTaken, StoreClosed, StoreError, StoreUnavailable
from store.scheduler import THREADS, Scheduler, Wake

log = logging.getLogger(__name__)

# Seconds. A lock or a database gives up earlier, so that the callers hear its reason.
WAIT_WITHIN = 5.0
LOOK_EVERY = 1.0  # a caller that waits looks what has become of its call
OUTAGE = 1.0  # a batch that fails after so long fails all who wait behind it
CLOSE_WITHIN = 5.0  # a write that hangs keeps its files open until it ends


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

    def _record(self, plant: Plant) -> tuple[Any, int]:
        """Return the item of a plant for ``Backend.append``, and its size."""
        return plant, plant.length()

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        entry = Entry(*self._record(plant))
        self._committer().submit((entry,), WAIT_WITHIN)
        if entry.error is not None:
            raise entry.error
        return entry.new

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        for plant in (plants := [*plants]):  # an iterator, too, counts once
            check_plant(plant)
        outcomes: list[bool | IdTaken] = []
        for entries in batches(Entry(*self._record(it)) for it in plants):
            self._committer().submit(entries, inf)
            for entry in entries:
                if entry.error is not None and not isinstance(entry.error, IdTaken):
                    raise entry.error
                outcomes.append(entry.error or entry.new)
        return outcomes

    def ping(self) -> None:
        self._committer().submit((), WAIT_WITHIN)  # all callers that wait share one

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
    # ``True`` or an error. It is set before the wake, which an interrupt may lose.
    outcome: bool | StoreError | None = None


class _Committer:
    """The calls of a store in one process, and the thread that serves them."""

    def __init__(self, store: CommittedStore) -> None:
        self._store = store
        self._backend: Backend | None = None
        # Those without an outcome, in their order; each may leave at any moment.
        self._calls: dict[_Call, None] = {}
        self._crowd = 0  # how many calls it takes to wake the thread
        self._bell = store._scheduler.allocate_lock()  # released to wake it
        self._bell.acquire()
        self._running = store._scheduler.allocate_lock()  # held by the thread
        # One wake for all: then they come back together, and share the next batch.
        wake: Wake = lambda calls: [call.wake() for call in calls]  # noqa: E731
        self._ring_soon, self._wake = store._scheduler.connect(self._ring, wake)

    # Methods of the callers, which may be interrupted anywhere.
    def submit(self, entries: Sequence[Entry], within: float) -> None:
        """Return within some seconds, when each entry is durable or has an error."""
        wait, wake = self._store._scheduler.waiter()
        call = _Call(entries, sum([entry.size for entry in entries]), wake)
        deadline = perf_counter() + within
        try:
            self._calls[call] = None
            self._start_thread()
            self._ring_soon()
            while not (wait(min(within, LOOK_EVERY)) or call.outcome):
                self._start_thread()  # the last one may have ended with an exception
                self._ring()  # what should have rung may have been interrupted
                if perf_counter() >= deadline:
                    raise StoreUnavailable('the store did not answer in time')
        finally:
            self._calls.pop(call, None)
        if isinstance(call.outcome, StoreError):  # its traceback grows with each raise
            raise call.outcome.with_traceback(None)

    def _start_thread(self) -> None:
        if not self._running.locked():
            try:
                self._store._scheduler.start_thread(self._run, ())
            except RuntimeError as ex:
                raise StoreUnavailable(f'no thread can be started: {ex}') from ex

    def _ring(self) -> None:
        if len(self._calls) >= self._crowd:
            with suppress(RuntimeError):  # it rings already
                self._bell.release()

    def close(self) -> None:
        """Have the thread of a closed store close its files, and wait for that."""
        until = perf_counter() + CLOSE_WITHIN
        while (self._backend or self._running.locked()) and perf_counter() < until:
            self._start_thread()
            self._ring()
            sleep(0.001)  # not acquire(): who is interrupted could keep the lock

    # What follows is of the thread, which no caller interrupts.
    def _run(self) -> None:
        with suppress(BaseException):  # of want of memory: see ``submit``
            if not self._running.locked():  # no other caller was faster
                with self._running:
                    self._serve()

    def _serve(self) -> None:
        """Serve batches until the store is closed."""
        took = 0.0  # by the last sync
        while not self._store._closed or self._calls:
            self._gather(took)
            batch = next(batches([*self._calls]), [])
            began, took = perf_counter(), 0.0
            outcome: bool | StoreError = True
            try:
                self._store._check_open()  # or refuse all who still wait
                took = self._commit(batch)
            except StoreError as ex:
                outcome = ex
            except BaseException as ex:  # want of memory, or a fault of ours
                log.error('%s: the write failed', self._store._shown, exc_info=ex)
                outcome = StoreUnavailable('the write was interrupted')
            if outcome is not True and perf_counter() > began + OUTAGE:
                batch = [*self._calls]
            if took > self._store.gather_above:  # counted before the first comes back
                self._crowd = len(self._calls)
            for call in batch:  # also if an entry has an error: it may rest on another
                call.outcome = call.outcome or outcome
                self._calls.pop(call, None)
            self._wake(batch)
        if self._backend is not None:
            with suppress(Exception):
                self._backend.close()
            self._backend = None

    def _gather(self, took: float) -> None:
        """Wait for calls: after a slow sync for a crowd, for some milliseconds."""
        until = perf_counter() + min(took, self._store.gather_within)
        while len(self._calls) < self._crowd:
            if not self._bell.acquire(timeout=max(0, until - perf_counter())):
                break
        self._crowd = 0  # before a look at the calls: from here on each one rings
        while not (self._calls or self._store._closed):
            self._bell.acquire()

    def _commit(self, batch: Sequence[_Call]) -> float:
        """Serve the adds of a batch, then its pings; return how long the sync took."""
        took, entries = 0.0, [entry for call in batch for entry in call.entries]
        for entry in entries:  # what a first attempt has found may not hold any more
            entry.error = None
        if self._backend is None:
            self._backend = self._store._open_backend()
        if entries and (sync := self._backend.append(entries)) is not None:
            began = perf_counter()
            sync()
            took = perf_counter() - began
            if self._store.on_sync is not None:
                with suppress(Exception):  # it should raise none
                    self._store.on_sync(len(entries), took)
        if not all(call.entries for call in batch):
            for call in batch:  # an add is no failure if a ping is one
                call.outcome = bool(call.entries) or None
            self._backend.ping()
        return took
