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

    # Of the committer: its calls block, so it needs a thread of the operating system.
    start_thread = staticmethod(_thread.start_new_thread)
    allocate_lock = staticmethod(_thread.allocate_lock)

    def waiter(self) -> tuple[Wait, Wake]:
        """Return two functions, ``wait`` and ``wake``.

        ``wait`` returns whether ``wake`` was called within some seconds. It is called
        once, by what ``connect`` returns, even before or after the wait.
        """
        # A bare lock parks a thread at the least cost: an Event costs four times that.
        lock = _thread.allocate_lock()
        lock.acquire()
        return lambda seconds: lock.acquire(timeout=seconds), lock.release

    def connect(self, ring: Wake, wake: Wake) -> tuple[Wake, Wake]:
        """Return ``ring`` for the callers, and ``wake`` for the committer.

        A scheduler may delay a ring, so that all callers that are ready go first, and
        share a batch. And it may have ``wake`` called in the thread of the callers.
        """
        return ring, wake


THREADS = Scheduler()
