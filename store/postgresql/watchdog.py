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
CONNECT_WITHIN = 2  # for an address, and as long for each of the first statements
CANCEL_WITHIN = 0.8  # until a statement ends that was cancelled
LOOK_EVERY = 0.1  # as psycopg does while it waits

Session = psycopg.Connection[Any]


class Watchdog:
    """A thread that ends a late statement of a connection, which is spent then.

    A ``with`` block is a statement. If it is late it is cancelled, since its answer
    says what it waited for; if it goes on its socket is shut down. As a cancellation
    might hit the next statement, there is none: the thread closes the connection.
    """

    within: float = CONNECT_WITHIN  # for a statement
    is_late = False

    def __init__(self, connection: Session, scheduler: Scheduler) -> None:
        self.connection, self._start_thread = connection, scheduler.start_thread
        # A duplicate: libpq closes its own early, and another file gets that number.
        self.socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._due = inf
        self._lock = scheduler.allocate_lock()  # while it is decided that it is late
        self._closing, self._idle = scheduler.allocate_lock(), scheduler.allocate_lock()
        self._closing.acquire()  # until then
        self._idle.acquire()
        self._start_thread(self._run, ())
        _all.add(self)

    def __enter__(self) -> None:
        self._due = time.monotonic() + self.within

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._due = inf
        if self.is_late:
            self._idle.release()

    def close(self) -> None:
        """Close the connection; if it was late, once its cancellation has ended."""
        self._closing.release()
        if not self.is_late:
            self._close()

    def _close(self) -> None:
        self.connection.close()
        self.socket.close()

    def _run(self) -> None:
        while not (self.is_late or self._closing.acquire(timeout=LOOK_EVERY)):
            with self._lock:
                self.is_late = time.monotonic() > self._due
        if self.is_late:
            try:
                self._start_thread(self._shut_down, ())
            except RuntimeError:  # there are no more threads
                self._shut_down()
            # PgBouncer 1.18 crashes if a client leaves while its cancel is under way.
            with suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=60)  # nobody waits for it
            self._idle.acquire()
            self._close()

    def _shut_down(self) -> None:
        if self._idle.acquire(timeout=CANCEL_WITHIN):
            self._idle.release()
        else:
            with suppress(OSError):  # it is not connected
                self.socket.shutdown(socket.SHUT_RDWR)


_all: WeakSet[Watchdog] = WeakSet()


def _leave_to_parent() -> None:
    """Close the sockets of the parent: its sessions would stay while a child lives."""
    # NOTE: their numbers stay taken, since libpq in the child still knows them.
    null = os.open(os.devnull, os.O_RDWR)
    for it in list(_all):
        with suppress(psycopg.Error, OSError):  # it is closed
            os.dup2(null, it.socket.fileno(), inheritable=False)
            os.dup2(null, it.connection.pgconn.socket, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_leave_to_parent)
