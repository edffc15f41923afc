"""How greenlets wait: for a store, and for each other.

One thread serves all connections of a worker, each in a greenlet. Calls that block (a
sync, a database, a lock) run in other threads: nothing is monkey-patched.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import gevent
from gevent.hub import Waiter

from store.scheduler import Scheduler, Wait, Wake


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
        return Gathering(function).add


class Gathering:
    """Calls a function once for all greenlets that ask for it.

    The call comes after a poll of the event loop: greenlets whose clients have sent
    something go on first, and no greenlet has asked since the poll before.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._loop = loop = gevent.get_hub().loop
        self._asked_in = 0  # an iteration of the loop, which has one poll
        # NOTE: not an idle watcher, which any client can delay, and which would gather
        # all connections in one batch, so that no other request is served meanwhile.
        self._check, self._idle = loop.check(), loop.idle()
        self._check.priority = loop.MINPRI

    def add(self) -> None:
        self._asked_in = self._loop.iteration
        if not self._check.active:
            self._check.start(self._polled)
            self._idle.start(lambda: None)  # so the loop does not sleep

    def _polled(self) -> None:
        if 0 < self._asked_in == self._loop.iteration:  # libuv says -1
            return
        self._check.stop()
        self._idle.stop()
        self._function()


class Turns:
    """Lets one greenlet go on after each poll of the event loop, and others first.

    With ``gevent.sleep(0)`` fifty greenlets would, whose clients have pipelined their
    next requests, before any client whose first request has just come.
    """

    def __init__(self) -> None:
        self._hub = hub = gevent.get_hub()
        self._waiting = deque[Any]()
        self._check, self._idle = hub.loop.check(), hub.loop.idle()
        self._check.priority = hub.loop.MINPRI

    def wait(self) -> None:
        if not self._waiting:
            self._check.start(self._next)
            self._idle.start(lambda: None)  # so the loop does not sleep
        self._waiting.append(gevent.getcurrent())
        self._hub.switch()

    def _next(self) -> None:
        greenlet = self._waiting.popleft()
        if not self._waiting:
            self._check.stop()
            self._idle.stop()
        greenlet.switch()
