"""How the callers of a store wait.

By default they are threads. A server that serves many requests in one thread passes a
scheduler of its own to ``open_store``, and serves others meanwhile.
"""

import _thread
from collections.abc import Callable

Wait = Callable[[float], bool]
Wake = Callable[..., object]


class Scheduler:
    """How the callers of a store wait; here each caller is a thread of its own."""

    def waiter(self) -> tuple[Wait, Wake]:
        """Return two functions, ``wait`` and ``wake``.

        ``wait`` takes some seconds at most, and returns whether ``wake`` was called:
        once, on the side of the callers, even before or after the wait.
        """
        # A bare lock parks a thread at the least cost: an Event costs four times that.
        lock = _thread.allocate_lock()
        lock.acquire()
        return lambda seconds: lock.acquire(timeout=seconds), lock.release

    def connect(self, ring: Wake, wake: Wake) -> tuple[Wake, Wake]:
        """Return ``ring`` for callers, and ``wake`` for another thread.

        The first may ring once for many calls: all callers that are ready can then go
        first, and share a batch. The second has ``wake`` called on their side.
        """
        return ring, wake


THREADS = Scheduler()
