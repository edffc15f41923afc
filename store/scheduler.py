"""How the callers of a store wait: a server with greenlets has a way of its own."""

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
        """Return ``wait``, and ``wake``, which is called once, also before or after it.

        ``wait`` returns whether that was within some seconds.
        """
        # A bare lock parks a thread at the least cost: an Event costs four times that.
        lock = _thread.allocate_lock()
        lock.acquire()
        return lambda seconds: lock.acquire(timeout=seconds), lock.release

    def connect(self, ring: Wake, wake: Wake) -> tuple[Wake, Wake]:
        """Return ``ring`` for the callers, and ``wake`` for the committer.

        A ring may be delayed, so that all callers that are ready share a batch, and
        ``wake`` be called in their thread.
        """
        return ring, wake


THREADS = Scheduler()
