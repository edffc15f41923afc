"""A pool of connections, and fast refusals while the database does not answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from store.errors import StoreClosed, StoreUnavailable
from store.postgresql import limits
from store.postgresql.connection import Connection


class Pool:
    """Connections that stay open, each lent to one caller at a time.

    Not psycopg_pool: it connects in a thread of its own, which keeps the reason of a
    failure, while the caller waits for a timeout.

    Args:
        connect: Makes a connection; called in the thread that needs it.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[Connection] = []
        self._in_use = 0  # or being made
        self._closed = False

    @contextmanager
    def lend(self, *, new: bool = False) -> Iterator[Connection]:
        """Lend a connection.

        Args:
            new: Close the idle connections and make a new one.

        Raises:
            TimeoutError: All connections stay in use.
            StoreClosed: ``close`` was called.
            Exception: Whatever ``connect`` raised.
        """
        connection = self._take(new)
        connection.start_use(limits.ANSWER_WITHIN)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def remove(self) -> Connection | None:
        """Remove an idle connection, if there is one, and return it."""
        with self._changed:
            return self._idle.pop() if self._idle else None

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        with self._changed:
            self._closed = True
            self._close_idle()
            self._changed.notify_all()

    def _take(self, new: bool) -> Connection:
        with self._changed:
            most = limits.MOST_CONNECTIONS
            if not self._changed.wait_for(
                lambda: self._closed or self._idle or self._in_use < most,
                limits.CONNECT_WITHIN,
            ):
                raise TimeoutError
            if self._closed:
                raise StoreClosed
            self._in_use += 1
            if new:
                self._close_idle()
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._changed.notify_all()
                # The server may allow no more connections: wait until one is returned.
                self._changed.wait_for(
                    lambda: self._idle or not self._in_use, limits.CONNECT_WITHIN
                )
                if not self._idle:
                    raise
                self._in_use += 1
                return self._idle.pop()

    def _give_back(self, connection: Connection) -> None:
        with self._changed:
            self._in_use -= 1
            self._idle.append(connection)
            if self._closed or not connection.is_idle():
                # All of them: the cause has probably broken the others, too.
                self._close_idle()
            self._changed.notify_all()

    def _close_idle(self) -> None:
        """Close the idle connections. REQUIRES: lock held."""
        while self._idle:
            self._idle.pop().close()


class Outage:
    """Spares callers the wait for a database that does not answer.

    During an outage one caller at a time asks the database, ``RETRY_AFTER`` seconds
    after the previous one. All others are refused at once.

    Args:
        store: The name of the store in messages.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()  # guards the decision to ask
        self._reason: str | None = None  # set during an outage
        self._next_attempt = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run a block that asks the database, and notice whether it answers.

        An outage begins when the block raises ``StoreUnavailable``. It ends when the
        block ends well or raises an error of the database, since that is an answer.
        Any other exception, for example a full pool, changes nothing.

        Raises:
            StoreUnavailable: There is an outage, and it is not yet time to ask, or
                another caller is asking.
        """
        with self._lock:
            if self._reason is not None:
                if time.monotonic() < self._next_attempt:
                    raise StoreUnavailable(self._reason, store=self._store)
                self._next_attempt = math.inf  # until this caller has asked
        try:
            yield
            self._reason = None
        except StoreUnavailable as ex:
            self._reason = ex.reason
            raise
        except psycopg.Error:
            self._reason = None
            raise
        finally:
            self._next_attempt = time.monotonic() + limits.RETRY_AFTER
