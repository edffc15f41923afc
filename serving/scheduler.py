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
        return Gathering(function).ask


class Gathering:
    """Calls a function once for all that ask, after a poll in which none has asked.

    No client can delay that, and other requests are served meanwhile, which a limit in
    time would not do: it would gather all connections in one batch.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._gathers = self._asked = False

    def ask(self) -> None:
        self._asked = True
        if not self._gathers:
            gevent.spawn_raw(self._gather)
            self._gathers = True  # not before: the caller may be interrupted

    def _gather(self) -> None:
        while self._asked:
            self._asked = False
            poll()
        self._gathers = False
        self._function()
