"""A store that opens at its first use, and again in a forked child."""

import abc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from store.base import Plant, PlantStore, batches, check_plant
from store.errors import IdTaken, StoreClosed, StoreUnavailable
from store.group_commit import Entry, GroupCommit
from store.scheduler import THREADS, Scheduler

OPENING_WITHIN = 2.0  # seconds that close() waits for an opening
CLOSE_WITHIN = 5.0  # seconds that close() waits in all


class Backend(Protocol):
    """The open part of a store, for the threads of the store."""

    def append(self, batch: Sequence[Entry[Any]]) -> Callable[[], object] | None:
        """Store plants, as the ``append`` of ``GroupCommit``."""

    def ping(self) -> None: ...
    def close(self) -> None:
        """Release everything, also if an error is raised."""

    def abandon(self) -> None:
        """Release what a forked child inherited; the parent still uses its own."""


BackendT = TypeVar('BackendT', bound=Backend)


class LazyStore(PlantStore, Generic[BackendT]):
    """A store that opens nothing until it is used.

    A child uses nothing that was opened before the fork: an ``flock`` that parent and
    child share excludes neither, and on one connection they mix their messages. A lock
    that is held at the fork stays held, and no thread exists in the child. So whatever
    is open belongs to a process id. (A hook for forks could never be removed.)

    Args:
        shown: The name of the store in errors.
        scheduler: How the callers wait.
    """

    def __init__(self, shown: str, *, scheduler: Scheduler = THREADS) -> None:
        self._shown = shown
        self._scheduler = scheduler
        self._closed = False
        self._processes: dict[int, _Process[BackendT]] = {}

    @abc.abstractmethod
    def _open_backend(self) -> BackendT:
        """Open the backend; called again at the next use if it raises."""

    @abc.abstractmethod
    def _record(self, plant: Plant) -> tuple[Any, int]:
        """Return the item of a plant for ``Backend.append``, and its size in bytes."""

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        return self._process().adds.submit(*self._record(plant))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        for plant in plants:
            check_plant(plant)
        added: list[bool | IdTaken] = []
        for batch in [*batches(plants)] or [[]]:  # without plants it only opens
            # Made by the caller: the allocator would keep their memory for each thread.
            records = [self._record(plant) for plant in batch]
            added += self._scheduler.call(partial(self._process().add_batch, records))
        return added

    def ping(self) -> None:
        """Share one ping among all callers that wait.

        A caller never gets the result of a ping that began before its call.
        """
        self._process().pings.submit(None, 0)

    def close(self) -> None:
        self._closed = True
        if process := self._processes.get(os.getpid()):
            # A write or a sync that hangs keeps its files until it ends.
            with suppress(TimeoutError):
                self._scheduler.call(process.close, within=CLOSE_WITHIN)

    def _backend(self) -> BackendT:
        """Return the backend; open it if it is not open, however long that takes."""
        return self._scheduler.call(self._process().open)

    def _process(self) -> '_Process[BackendT]':
        self._check_open()
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:  # setdefault() is atomic
            process = self._processes.setdefault(pid, _Process(self))
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed


class _Process(Generic[BackendT]):
    """The state of a store in one process.

    Its methods run in threads of the store, to their end: nothing interrupts them.
    """

    def __init__(self, store: LazyStore[BackendT]) -> None:
        self._store = store
        self._backend: BackendT | None = None
        self._opening = store._scheduler.lock()  # held while _backend changes
        queue = partial(
            GroupCommit[Any], store._scheduler, observe=self._observe, late=self._late
        )
        self.adds = queue(lambda batch: self.open().append(batch))
        self.pings = queue(lambda batch: self.open().ping())

    def open(self) -> BackendT:
        if (backend := self._backend) is not None:
            return backend
        processes = self._store._processes
        with self._opening:
            self._store._check_open()  # a batch may come here after a close
            for pid in processes.keys() - {os.getpid()}:  # from before a fork
                if (inherited := processes.pop(pid)._backend) is not None:
                    inherited.abandon()
            if self._backend is None:
                self._backend = self._store._open_backend()
            backend = self._backend
        if self._store._closed:  # meanwhile
            self.close()
            raise StoreClosed
        return backend

    def add_batch(self, records: Sequence[tuple[Any, int]]) -> list[Any]:
        """Add plants as one batch that waits for no others."""
        batch = [Entry[Any](item, size) for item, size in records]
        backend = self.open()
        if batch and (sync := backend.append(batch)):
            sync()
        for entry in batch:
            if isinstance(entry.error, StoreUnavailable):
                raise entry.error
        return [entry.error or entry.new for entry in batch]

    def close(self) -> None:
        self.adds.close()
        self.pings.close()
        if not self._opening.acquire(timeout=OPENING_WITHIN):
            return  # open() closes it
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            self._backend = None
            self._opening.release()

    def _observe(self, plants: int, seconds: float) -> None:
        if self._store.on_sync is not None:
            self._store.on_sync(plants, seconds)

    def _late(self) -> StoreUnavailable:
        is_open = self._backend is not None
        reason = 'did not answer in time' if is_open else 'is being opened'
        return StoreUnavailable(f'the store {reason}', store=self._store._shown)
