"""The connections to a database, and fast refusals while it does not answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from store.base import Create
from store.errors import StoreClosed, StoreUnavailable
from store.postgresql.connection import CREATE_TABLE, PROBE, Connection, explained
from store.url import masked

Result = TypeVar('Result')

# Time limits in seconds. To make a connection.
CONNECT_WITHIN = 2
# Between two attempts to reach a database that does not answer.
RETRY_AFTER = 0.1


class Pool:
    """Connections that stay open, each lent to one caller at a time.

    During an *outage*, while the database does not answer, one caller at a time asks
    it, ``RETRY_AFTER`` seconds after the previous one. All others are refused at once.

    Not psycopg_pool: it connects in a thread of its own, which keeps the reason of a
    failure, while the caller waits for a timeout.

    Args:
        url: The URL of the database.
        create: With ``never``, a table that is missing is not made.
    """

    def __init__(self, url: str, create: Create) -> None:
        self._shown = masked(url)
        self._parameters: dict[str, Any] = {
            'connect_timeout': CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
        }
        self._may_create = create != 'never'
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[Connection] = []
        self._lent = 0  # or being made
        self._closed = False
        self._outage: str | None = None  # the reason
        self._next_attempt = 0.0  # in an outage

    def run(
        self, function: Callable[..., Result], *arguments: object, repeat: bool = True
    ) -> Result:
        """Call a function with a connection, and once more if the connection is lost.

        The server may have ended an idle session long ago. To repeat an add is safe: a
        committed plant is found, and compared.

        Raises:
            StoreUnavailable, StoreClosed: As ``lend`` does.
        """
        with self.lend() as connection:
            try:
                return function(connection, *arguments)
            except psycopg.Error as ex:
                if isinstance(ex, errors.ReadOnlySqlTransaction):
                    # A standby now; another host may be the primary.
                    connection.close()
                if connection.is_idle() or connection.hangs() or not repeat:
                    raise
        return self.run(function, *arguments, repeat=False)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lend a connection.

        Raises:
            StoreUnavailable: The database reports an error, or does not answer.
            StoreClosed: ``close`` was called.
        """
        with self._changed:
            if self._closed:
                raise StoreClosed
            asks = self._outage is not None
            if self._outage is not None and time.monotonic() < self._next_attempt:
                raise StoreUnavailable(self._outage, store=self._shown)
            self._next_attempt = math.inf  # until this caller has asked
            connection = self._idle.pop() if self._idle else None
            self._lent += 1
        outage = None
        try:
            with explained(self._shown):
                connection = connection or self._connect_or_wait()
                connection.start_use()
                yield connection
        except StoreUnavailable as ex:
            # Any other error is an answer of the database.
            if connection is None or connection.hangs():
                outage = ex.reason
            raise
        finally:
            self._give_back(connection, outage, asks)

    def ping(self) -> None:
        self.run(Connection.execute, PROBE)

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _give_back(
        self, connection: Connection | None, outage: str | None, asks: bool
    ) -> None:
        if connection is not None and not connection.is_idle():
            connection.close()
        with self._changed:
            self._lent -= 1
            # A caller from before an outage lets no second one ask when it ends.
            if asks or self._outage is None:
                self._outage = outage
                self._next_attempt = time.monotonic() + RETRY_AFTER
            if connection is not None:
                self._idle.append(connection)
                if self._closed or connection.closed:
                    # All of them: the cause has probably broken the others, too.
                    while self._idle:
                        self._idle.pop().close()
            self._changed.notify_all()

    def _connect_or_wait(self) -> Connection:
        """Connect; or wait for a connection, if the server allows no more of them."""
        try:
            return self._connect()
        except psycopg.OperationalError:
            with self._changed:
                self._lent -= 1  # callers that fail at once do not wait for each other
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._idle or not self._lent, CONNECT_WITHIN
                )
                self._lent += 1
                if not self._idle:
                    raise
                return self._idle.pop()

    def _connect(self, *, to_read: bool = False) -> Connection:
        changes = {'target_session_attrs': 'any'} if to_read else {}
        connection = Connection.connect(**self._parameters | changes)
        try:
            encoding = connection.info.parameter_status('server_encoding')
            if encoding != 'UTF8':
                reason = f'the database is encoded in {encoding}'
                raise StoreUnavailable(reason, store=self._shown)
            connection.configure(to_read=to_read)
            if not to_read:
                self._check_table(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_table(self, connection: Connection) -> None:
        """Check that plants can be added; make the table if it is missing."""
        try:
            connection.execute(PROBE)
        except errors.UndefinedTable:
            if not self._may_create:
                raise
            # Another process may have entered this name into the catalogue just now.
            with suppress(
                errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
            ):
                connection.execute(CREATE_TABLE)
            connection.execute(PROBE)
        self._may_create = False
