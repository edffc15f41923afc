"""A database over one connection, which is opened again if it was lost."""

import math
import time
from typing import Any

import psycopg

from store.postgresql.connection import Connection
from store.postgresql.reasons import Unavailable, explain
from store.postgresql.target import Target

RETRY_AFTER = 0.05  # seconds between two attempts to connect


class Database:
    """Executes transactions, for one thread at a time."""

    def __init__(self, target: Target, *, to_read: bool = False) -> None:
        self.target, self.to_read = target, to_read
        self._connection: Connection | None = None
        self._outage: Unavailable | None = None  # of the last attempt to connect
        self._next_attempt = -math.inf  # during an outage

    def transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them.

        They are executed once more over a new connection if that may help, and the
        server has said that the first one has stored nothing.
        """
        was_open = self._is_connected()
        while True:
            connection = self._connection or self._connect()
            try:
                return connection.transact(statements, *values, begin=begin)
            except psycopg.Error as ex:
                error = self._explain(ex)
                if error.retry != 'connect' or connection.closed or not was_open:
                    # NOTE: psycopg's error shows DETAIL.
                    raise error from None
                was_open, connection.is_spent = False, True
            finally:
                if connection.is_spent or connection.closed:
                    self.close()

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _is_connected(self) -> bool:
        if self._connection is not None and self._connection.has_ended():
            self.close()
        return self._connection is not None

    def _connect(self) -> Connection:
        if self._outage is not None and time.monotonic() < self._next_attempt:
            raise self._outage.with_traceback(None)
        try:
            found = Connection.open(self.target.parameters, to_read=self.to_read)
        except psycopg.Error as ex:
            self._outage = self._explain(ex)
            self._next_attempt = time.monotonic() + RETRY_AFTER
            raise self._outage from None
        self._connection, self._outage = found, None
        return found

    def _explain(self, error: psycopg.Error) -> Unavailable:
        given = self.target.parameters
        secrets = f'{given.get("password")} {given.get("sslpassword")}'
        return explain(error, self.target.shown, secrets)
