"""How the callers of a store wait: for each other, and for calls that block.

A store is called by many threads at once, so by default they wait as threads do. A
server that serves many requests in one thread passes a scheduler of its own to
``open_store``, which serves other requests meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import sleep
from typing import Final, Protocol, TypeVar

Result = TypeVar('Result')


class Wakeup(Protocol):
    """What one caller waits for, once."""

    def wait(self) -> None:
        """Return after ``wake``, also if ``wake`` came first."""

    def wake(self) -> None:
        """Let the caller go on; called once, by any thread."""


class ThreadWakeup:
    """What a thread waits for.

    NOTE: a bare lock, taken by its constructor, is the cheapest way to park a thread.
    An Event costs four times as much.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        self._lock.acquire()

    def wake(self) -> None:
        self._lock.release()


class Scheduler(Protocol):
    """How the callers of a store wait; a subclass begins with what threads do."""

    def give_way(self) -> bool:
        """Let other callers run that are ready; return whether more may follow."""
        # Some threads wait only for the GIL. This sleep takes about 60 us (timer
        # slack), enough for them to submit; a shorter release of the GIL is seldom
        # enough. A second sleep costs as much as it gains.
        sleep(0)
        return False

    def waiter(self) -> Wakeup:
        """Return what the current caller waits for."""
        return ThreadWakeup()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function that blocks, and return its result."""
        return function()

    def lock(self) -> AbstractContextManager[object]:
        """Return a mutex for callers of the store.

        A function that is given to ``call`` must not take it.
        """
        return threading.Lock()


class ThreadScheduler(Scheduler):
    """Each caller is a thread of its own."""


THREADS: Final[Scheduler] = ThreadScheduler()
