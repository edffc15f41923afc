"""How callers wait: for each other, and for what takes a while.

A store is called by many threads at once, so they wait as threads do. A server that
serves many requests with one thread sets ``current`` to what lets it go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Protocol
from typing import TypeVar

Result = TypeVar('Result')


class Waiter(Protocol):
    """One caller that waits for another, once."""

    def wait(self) -> None:
        """Return after ``wake``, also if that came before."""

    def wake(self) -> None:
        """Let it go on; called once, by any thread."""


class Scheduler(Protocol):
    """How the callers of a server wait."""

    def give_way(self) -> bool:
        """Let callers come in that are ready to; return whether more may follow."""

    def waiter(self) -> Waiter:
        """Return a waiter for the caller."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function that may take a while, and return what it returns."""

    def later(self, function: Callable[..., object], *args: object) -> None:
        """Call a function before long, in this thread; it must not raise."""


class ThreadWaiter:
    """A thread that waits.

    NOTE: a bare lock that is taken at once: the cheapest way to park a thread. An Event
    is four times the work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        self._lock.acquire()

    def wake(self) -> None:
        self._lock.release()


class Threads:
    """Callers are threads, and each has time of its own."""

    def give_way(self) -> bool:
        # For threads that only wait for the GIL. It takes some 60 us (timer slack), and
        # that lets them come in: to let go of the GIL for less seldom does. More often
        # than once, it costs as much as it brings.
        sleep(0)
        return False

    def waiter(self) -> Waiter:
        return ThreadWaiter()

    def call(self, function: Callable[[], Result]) -> Result:
        return function()

    def later(self, function: Callable[..., object], *args: object) -> None:
        function(*args)


current: Scheduler = Threads()
