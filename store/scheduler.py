"""How the callers of a store wait: for each other, and for calls that block.

A store is called by many threads at once, so by default they wait as threads do. A
server that serves many requests in one thread passes a scheduler of its own to
``open_store``, which serves other requests meanwhile.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import sleep
from typing import Any, Final, TypeVar

Result = TypeVar('Result')


class Scheduler:
    """How the callers of a store wait; here each caller is a thread of its own."""

    def give_way(self) -> bool:
        """Let other callers run that are ready; return whether to call this again."""
        # Some threads wait only for the GIL. This sleep takes about 60 us (timer
        # slack), enough for them to submit; a shorter release of the GIL is seldom
        # enough. A second sleep costs as much as it gains.
        sleep(0)
        return False

    def waiter(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return two functions, each of which is called once: ``wait`` and ``wake``.

        The current caller waits in ``wait`` until any thread has called ``wake``, which
        may happen first.
        """
        # A bare lock parks a thread at the least cost: an Event costs four times that.
        lock = threading.Lock()
        lock.acquire()
        return lock.acquire, lock.release

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function that blocks, and return its result."""
        return function()

    def lock(self) -> AbstractContextManager[Any]:
        """Return a mutex for callers of the store.

        A function that is given to ``call`` must not take it.
        """
        return threading.Lock()


THREADS: Final = Scheduler()
