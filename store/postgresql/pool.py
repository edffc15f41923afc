"""Lends connections to a database, and spares it while it does not answer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from store.errors import StoreClosed, StoreUnavailable
from store.postgresql.connection import UNSERVED, Connection, Result, explained

IDLE = psycopg.pq.TransactionStatus.IDLE  # never of a connection that is lost
# In seconds.
RETRY_AFTER = 0.1  # between two attempts to reach a database that does not answer
WAIT_WITHIN = 2  # for a connection that another caller has
FULL_FOR = 30  # how long callers wait for each other's connections before they connect


class Outage:
    """The time from one failed attempt to the next; a failure replaces it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.next_attempt = time.monotonic() + RETRY_AFTER
        self.is_attempted = False  # by one caller


class Pool:
    """Lends connections, each to one caller at a time, and keeps them open.

    During an outage one caller at a time asks the database, ``RETRY_AFTER`` seconds
    after the previous one. All others are refused at once, with the reason, for which
    psycopg_pool would let them wait for a timeout.
    """

    def __init__(self, connect: Callable[[], Connection], shown: str) -> None:
        self._connect = connect
        self._shown = shown
        self._full_until = 0.0  # a pooler has no more connections
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[Connection] = []
        self._active = 0  # callers that have a connection, or make one
        self._outage: Outage | None = None
        self._closed = False

    def run(
        self, function: Callable[..., Result], *arguments: object, again: bool = False
    ) -> Result:
        """Call a function with a connection; again, once, if that was lost."""
        with self.lend() as connection:
            try:
                return function(connection, *arguments)
            except psycopg.Error as ex:
                if isinstance(ex, errors.ReadOnlySqlTransaction):
                    connection.close()  # a standby now; another host may be the primary
                if again or connection.timed_out or not connection.closed:
                    raise
        return self.run(function, *arguments, again=True)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lend a connection; whatever the database refuses is ``StoreUnavailable``."""
        with self._changed:
            if self._closed:
                raise StoreClosed
            outage = self._outage
            if outage is not None:
                if outage.is_attempted or time.monotonic() < outage.next_attempt:
                    raise StoreUnavailable(outage.reason, store=self._shown)
                outage.is_attempted = True
            self._active += 1
        new_outage = connection = None
        try:
            with explained(self._shown):
                connection = self._take()
                connection.start_use()
                yield connection
        except StoreUnavailable as ex:
            # An error on a connection that did not time out is an answer.
            if connection is None or connection.timed_out:
                new_outage = Outage(ex.reason)
            raise
        finally:
            with self._changed:
                # A caller from before an outage knows less than the one who found it.
                if self._outage is outage:
                    self._outage = new_outage
                if connection is not None:
                    self._idle.append(connection)
                    if self._closed or connection.info.transaction_status != IDLE:
                        # The cause has probably broken the others, too.
                        self._close_idle()
                self._active -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        with self._changed:
            self._closed = True
            self._close_idle()

    def _take(self) -> Connection:
        """Return an idle connection, or a new one, or one that is given back."""
        is_full = time.monotonic() < self._full_until
        if idle := self._take_idle(WAIT_WITHIN if is_full else 0):
            return idle
        try:
            return self._connect()
        except psycopg.OperationalError as ex:
            if not (idle := self._take_idle(WAIT_WITHIN)):
                raise
            if UNSERVED in str(ex):  # after seconds; a server refuses at once
                self._full_until = time.monotonic() + FULL_FOR
            return idle

    def _take_idle(self, wait: float) -> Connection | None:
        """Return an idle one; wait for it (seconds) only while callers are active."""
        with self._changed:
            if wait:
                self._active -= 1  # who waits gives nothing back
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: self._idle or not self._active, wait)
                finally:
                    self._active += 1
            return self._idle.pop() if self._idle else None

    def _close_idle(self) -> None:
        """Close what nobody uses. REQUIRES: lock held."""
        while self._idle:
            self._idle.pop().close()
