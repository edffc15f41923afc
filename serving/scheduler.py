"""How greenlets wait: for a store, and for each other.

One thread serves all connections of a worker, each in a greenlet. Calls that block (a
sync, a database, a lock) run in other threads: nothing is monkey-patched.
"""

from collections.abc import Callable
from functools import partial

import gevent
from gevent.hub import Waiter

from store.scheduler import Scheduler, Wait, Wake


def poll() -> None:
    """Let those greenlets go on whose clients have sent something, in one poll."""
    hub = gevent.get_hub()
    with hub.loop.timer(1e-9, priority=hub.loop.MINPRI) as timer:  # after all sockets
        hub.wait(timer)


class GeventScheduler(Scheduler):
    """Callers of a store are greenlets; its threads are not."""

    def waiter(self) -> tuple[Wait, Wake]:
        waiter = Waiter()
        loop = waiter.hub.loop

        def wait(seconds: float) -> bool:
            timer = loop.timer(seconds)
            timer.start(waiter.switch, False)
            try:
                return bool(waiter.get())
            finally:
                timer.close()

        return wait, partial(loop.run_callback_threadsafe, waiter.switch, True)

    def gathered(self, function: Callable[[], object]) -> Callable[[], object]:
        loop = gevent.get_hub().loop
        timer = loop.timer(1e-9, priority=loop.MINPRI)  # after all sockets

        def ask() -> None:
            timer.stop()  # until a poll in which nobody asks
            timer.start(function)

        return ask
