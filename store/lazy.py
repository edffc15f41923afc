"""A store that opens at its first use, and again in a forked child."""

import abc
import os
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from store.base import Plant, PlantStore, batches, check_plant
from store.errors import IdTaken, StoreClosed, StoreUnavailable
from store.scheduler import THREADS, Scheduler


class Backend(Protocol):
    """The open part of a store; its methods get plants that were checked."""

    def add(self, plant: Plant) -> bool: ...
    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]: ...
    def ping(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Release what a forked child inherited; the parent still uses its own."""


BackendT = TypeVar('BackendT', bound=Backend)


class _Process(Generic[BackendT]):
    """The state of a store in one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.backend: BackendT | None = None
        self.opening = scheduler.lock()  # held while backend changes
        self.pinging = scheduler.lock()  # held while the one ping runs
        self.pings = 0  # that have begun
        self.error: Exception | None = None  # of the last ping


class LazyStore(PlantStore, Generic[BackendT]):
    """A store that opens nothing until it is used.

    Nothing opened before a fork is used after it: an ``flock`` that parent and child
    share excludes neither, and on one connection they mix their messages. A lock that
    is held at the fork stays held. So a backend belongs to one process id. Callbacks of
    ``os.register_at_fork`` would keep the code from before a reload in memory.
    """

    def __init__(self, *, scheduler: Scheduler = THREADS) -> None:
        self._scheduler = scheduler
        self._closed = False
        self._processes: dict[int, _Process[BackendT]] = {}

    @abc.abstractmethod
    def _open_backend(self) -> BackendT:
        """Open the backend; called again at the next use if it raises."""

    def _report_sync(self, plants: int, seconds: float) -> None:
        if self.on_sync is not None:
            self.on_sync(plants, seconds)

    def add(self, plant: Plant) -> bool:
        check_plant(plant)
        return self._backend().add(plant)

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        for plant in plants:
            check_plant(plant)
        backend = self._backend()
        return [new for batch in batches(plants) for new in backend.add_many(batch)]

    def ping(self) -> None:
        """Share one ping among all callers that wait, so that it takes one thread.

        A caller never gets the result of a ping that began before its call.
        """
        process = self._process()
        pings_before = process.pings
        with process.pinging:
            if process.pings == pings_before:
                process.pings += 1
                process.error = StoreUnavailable('the check was interrupted')
                try:
                    self._scheduler.call(self._backend().ping)
                    process.error = None
                except Exception as ex:
                    process.error = ex
            if process.error is not None:
                raise process.error

    def close(self) -> None:
        self._closed = True
        process = self._process()
        with process.opening:
            backend, process.backend = process.backend, None
        if backend is not None:
            backend.close()

    def _backend(self) -> BackendT:
        process = self._process()
        backend = process.backend
        if backend is None:
            with process.opening:
                self._check_open()
                backend = process.backend or self._scheduler.call(self._open_backend)
                process.backend = backend
        return backend

    def _process(self) -> _Process[BackendT]:
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:
            # setdefault() and pop() are atomic; a lock may have been held at the fork.
            process = self._processes.setdefault(pid, _Process(self._scheduler))
            for other in self._processes.keys() - {pid}:
                inherited = self._processes.pop(other, None)
                if inherited is not None and inherited.backend is not None:
                    inherited.backend.abandon()
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed
