"""How greenlets wait: for a store, for their clients, and for each other.

One thread serves all connections of a worker, each in a greenlet. Calls that block (a
sync, a database, a lock) run in other threads: nothing is monkey-patched.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import gevent
from gevent.hub import Waiter
from gevent.monkey import get_original
from greenlet import getcurrent

from store.scheduler import Scheduler, Wait, Wake


class GeventScheduler(Scheduler):
    """How greenlets wait in a store; its threads are never patched by gevent."""

    def start(self, function: Callable[[], object]) -> None:
        get_original('_thread', 'start_new_thread')(function, ())

    def lock(self) -> Any:
        return get_original('_thread', 'allocate_lock')()

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
    """Decides which greenlets go on when the event loop has polled its sockets.

    First all whose clients have sent something, in the order of arrival. (The event
    loop reports the latest first: some requests would take twice as long as others.)

    Then one greenlet whose client has pipelined its next request. With ``sleep(0)`` all
    greenlets of such clients would go on before any other: beside 300 of them a healthy
    client waited twice as long, and under one load forever.
    """

    def __init__(self) -> None:
        self._hub = hub = gevent.get_hub()
        self._waiting = set[Any]()
        self._arrived: list[Any] = []
        self._pipelined = deque[Any]()
        self._idle = hub.loop.idle()
        self._check = hub.loop.check()
        self._check.priority = hub.loop.MINPRI + 1  # before a Gathering looks
        self._check.start(self._next)

    def wait_for_data(self, readable: Any) -> None:
        """Return when a watcher has reported its socket."""
        greenlet = getcurrent()
        self._waiting.add(greenlet)
        if not readable.active:  # to stop and start it each time takes a system call
            readable.start(self._report, readable, greenlet)
        self._hub.switch()

    def _report(self, readable: Any, greenlet: Any) -> None:
        if greenlet in self._waiting:
            self._waiting.remove(greenlet)
            self._arrived.append(greenlet)
        else:
            readable.stop()  # until its greenlet waits again

    def wait_for_others(self, *, is_next: bool = False) -> None:
        """Return after the arrived greenlets and, unless ``is_next``, the pipelined."""
        if not self._pipelined:
            self._idle.start(lambda: None)  # so the loop does not sleep
        greenlet = getcurrent()
        (self._pipelined.appendleft if is_next else self._pipelined.append)(greenlet)
        try:
            self._hub.switch()
        except BaseException:  # Ctrl-C ends the worker also here
            self._pipelined.remove(greenlet)
            raise

    def _next(self) -> None:
        while self._arrived:
            self._arrived.pop().switch()
        if self._pipelined:
            self._pipelined.popleft().switch()
            if not self._pipelined:
                self._idle.stop()
