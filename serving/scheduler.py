"""How greenlets wait: for a store, for their clients, and for each other.

One thread serves all connections of a worker, each in a greenlet. Calls that block (a
sync, a database, a lock) run in other threads. So a store is the same code under every
server, and nothing is monkey-patched.
"""

from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import gevent
from gevent.hub import Waiter
from gevent.lock import Semaphore
from gevent.monkey import get_original
from greenlet import getcurrent

from store.scheduler import Scheduler

THREADS = 10  # for calls that block: several syncs, waits for a lock or a database


class GeventScheduler(Scheduler):
    """How greenlets wait in a store; calls that block run in threads of its own.

    In those of the hub 0.73 of the plants are added (4 clients, side by side).
    """

    def give_way(self) -> bool:
        poll_sockets()
        return True

    def waiter(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        waiter = Waiter()
        return waiter.get, partial(waiter.hub.loop.run_callback, waiter.switch, None)

    def lock(self) -> Any:
        return Semaphore()

    def call(self, function: Callable[[], Any]) -> Any:
        caller = Waiter()
        self._calls.put((caller, function))
        return caller.get()

    @cached_property
    def _calls(self) -> Any:
        """The queue of the threads; they start at the first call, so in a worker."""
        # System threads, also where an embedder has patched the modules.
        calls = get_original('queue', 'SimpleQueue')()
        outcomes = deque[tuple[Any, ...]]()
        wakeup = gevent.get_hub().loop.async_()

        def run() -> None:
            while True:
                caller, function = calls.get()
                try:
                    outcomes.append((caller.switch, function()))
                except BaseException as ex:
                    outcomes.append((caller.throw, type(ex), ex, ex.__traceback__))
                wakeup.send()

        def resume_callers() -> None:
            while outcomes:
                resume, *outcome = outcomes.popleft()
                resume(*outcome)

        wakeup.start(resume_callers)
        for _ in range(THREADS):
            get_original('_thread', 'start_new_thread')(run, ())
        return calls


def poll_sockets() -> None:
    """Return when the event loop has polled its sockets and called their watchers."""
    hub = gevent.get_hub()
    # NOTE: not sleep(0), which returns before the loop polls the sockets; nor idle(),
    # which any client can delay, and which gathers all connections in one batch, so
    # that no other request is served during its sync.
    check, idle = hub.loop.check(), hub.loop.idle()
    check.priority = hub.loop.MINPRI
    check.start(getcurrent().switch)
    idle.start(lambda: None)  # so the loop does not sleep
    try:
        hub.switch()
    finally:
        check.close()
        idle.close()


class Turns:
    """Decides which greenlets go on when the event loop has polled its sockets.

    First all whose clients have sent something, in the order in which they did. (The
    loop reports the latest first: some requests would take twice as long as others.)

    Then one greenlet whose client has pipelined its next request. With ``sleep(0)``
    those that pipeline would take turns among themselves first: beside 300 of them a
    healthy client waited twice as long, in one load for good.
    """

    def __init__(self) -> None:
        self._hub = hub = gevent.get_hub()
        self._waiting = set[Any]()
        self._arrived: list[Any] = []
        self._pipelined = deque[Any]()
        self._idle = hub.loop.idle()
        self._check = hub.loop.check()
        self._check.priority = hub.loop.MINPRI + 1  # before poll_sockets() returns
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

    def wait_for_others(self) -> None:
        """Return when it is the turn of this greenlet, which has a request to read."""
        if not self._pipelined:
            self._idle.start(lambda: None)  # so the loop does not sleep
        self._pipelined.append(getcurrent())
        self._hub.switch()

    def _next(self) -> None:
        while self._arrived:
            self._arrived.pop().switch()
        if self._pipelined:
            self._pipelined.popleft().switch()
            if not self._pipelined:
                self._idle.stop()
