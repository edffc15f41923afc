"""A watchdog ends what a database does not answer in time."""

import os
import socket
import time
from contextlib import suppress
from math import inf
from typing import Any
from weakref import WeakSet

import psycopg

from store.scheduler import Scheduler

# In seconds.
CANCEL_WITHIN = 0.8  # until a statement ends that was cancelled
LOOK_EVERY = 0.1  # as psycopg does while it waits


class Watchdog:
    """A thread that ends a late statement of a connection, which is spent then.

    A ``with`` block is a statement. If it is late it is cancelled, since its answer
    says what it waited for; if it goes on its socket is shut down. A cancellation
    might hit the next statement, so there must be none.
    """

    is_late = False

    def __init__(
        self, connection: psycopg.Connection[Any], within: float, scheduler: Scheduler
    ) -> None:
        self.connection, self._within = connection, within
        self._due = inf
        self._lock = scheduler.allocate_lock()
        self._closing = scheduler.allocate_lock()
        self._closing.acquire()  # until then
        self._start_thread = scheduler.start_thread
        self._start_thread(self._run, ())
        _all.add(self)

    def __enter__(self) -> None:
        self._due = time.monotonic() + self._within

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:  # after it ``is_late`` does not change
            self._due = inf

    def close(self) -> None:
        self._closing.release()
        self.connection.close()

    def _run(self) -> None:
        while not self._closing.acquire(timeout=LOOK_EVERY):
            with self._lock:
                if (now := time.monotonic()) > self._due:
                    if self.is_late:
                        self._shut_down()
                    else:
                        with suppress(RuntimeError):  # there are no more threads
                            self._start_thread(self._cancel, ())
                    self.is_late, self._due = True, now + CANCEL_WITHIN

    def _cancel(self) -> None:
        # PgBouncer 1.18 crashes if a client leaves while its cancel is under way.
        with suppress(psycopg.Error):
            self.connection.cancel_safe(timeout=60)  # nobody waits for it

    def _shut_down(self) -> None:
        pgconn = self.connection.pgconn
        with (
            suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(pgconn.socket)) as duplicate,
        ):
            # If libpq has closed it, another file may have got its number: it raises.
            assert pgconn.socket
            duplicate.shutdown(socket.SHUT_RDWR)


_all: WeakSet[Watchdog] = WeakSet()


def _leave_to_parent() -> None:
    """Close the sockets of the parent: its sessions would stay while a child lives."""
    # NOTE: their numbers stay taken, since libpq in the child still knows them.
    null = os.open(os.devnull, os.O_RDWR)
    for it in list(_all):
        with suppress(psycopg.Error):  # it is closed
            os.dup2(null, it.connection.pgconn.socket, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_leave_to_parent)
