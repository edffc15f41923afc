"""A database over one connection, which is opened again if it was lost."""

import logging
import select
import time
from contextlib import suppress
from math import inf
from typing import Any

import psycopg
from psycopg.errors import Diagnostic

from store.postgresql.database import Target, Unavailable
from store.postgresql.watchdog import Watchdog

log = logging.getLogger(__name__)

# In seconds. A caller waits for 5, whatever a batch waits for.
STATEMENT_WITHIN = 3  # at the server, whose error says what happened
ANSWER_WITHIN = 3.6  # for a server that hangs, before the statement is cancelled
LOCK_WITHIN = 0.3  # while other plants of the batch wait
READ_WITHIN = 60  # for a page of plants
ASK_EVERY = 1  # so it is noticed that the table was altered

# What must hold, whatever the defaults of the role and the database.
SETTINGS = """SET {0} ISOLATION LEVEL READ COMMITTED;
SET {1} client_min_messages TO warning; SET {1} synchronous_commit TO {2};
SET {1} statement_timeout TO '{3}s'; SET {1} lock_timeout TO '{4}s'; """
# Whether a pooler shares the session, and whether commits are durable.
STATE = """SELECT pg_backend_pid(), current_setting('synchronous_commit'),
current_setting('server_encoding'), array(SELECT name FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off')"""

IDLE, INERROR = psycopg.pq.TransactionStatus.IDLE, psycopg.pq.TransactionStatus.INERROR


class Connection:
    """Executes transactions, for one thread at a time; none takes long."""

    def __init__(self, target: Target, *, to_read: bool = False) -> None:
        self._target, self._to_read = target, to_read
        self._watchdog: Watchdog | None = None  # of the open connection
        self._begin = ''  # of each transaction
        self._ask_at = -inf
        self._warning: str | None = None

    def transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements for ``{0}``, the table, as one transaction; return rows.

        If the server refuses, and a new connection may help, execute them once more.
        """
        if self._watchdog is not None and self._has_ended(self._watchdog):
            self.close()
        was_open = self._watchdog is not None
        try:
            if self._watchdog is None:
                self._connect()
            if time.monotonic() >= self._ask_at:
                self._ask()
                self._ask_at = time.monotonic() + ASK_EVERY
            name = self._target.table.replace('%', '%%')  # values are put in for %s
            return self._execute(statements.format(name), *values, begin=begin)
        except Unavailable as ex:
            if ex.retry != 'connect' or not was_open or self._watchdog is None:
                raise
        self.close()
        return self.transact(statements, *values, begin=begin)

    def _ask(self) -> None:
        """Find the table, over each new connection, and again after a second."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        watchdog, self._watchdog, self._ask_at = self._watchdog, None, -inf
        if watchdog is not None:
            if watchdog.is_late:
                self._target.put_last()
            watchdog.close()

    def _execute(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements over the open connection; return the rows of all."""
        assert self._watchdog is not None
        watchdog, connection = self._watchdog, self._watchdog.connection
        begin += self._begin
        # NOTE: several statements are one message, in which nothing is prepared.
        kind = psycopg.ClientCursor if begin or ';' in statements else psycopg.Cursor
        rows: list[Any] = []
        self._warning = None
        try:
            with watchdog:
                cursor = kind(connection).execute(begin + statements, values)
                for result in cursor.results():
                    rows += result.fetchall() if result.description else ()
        except psycopg.Error as ex:
            if watchdog.is_late and not ex.sqlstate:
                raise self._target.unavailable('57014', 'no answer') from None
            raise self._target.explain(ex) from None  # NOTE: psycopg's has DETAIL
        finally:
            pgconn = connection.pgconn
            if not watchdog.is_late and pgconn.transaction_status == INERROR:
                with watchdog, suppress(psycopg.Error):
                    connection.rollback()  # of an explicit BEGIN
            if watchdog.is_late or pgconn.transaction_status != IDLE:
                self.close()
        # If its wait for a standby is cancelled, a commit succeeds, with a warning.
        if self._warning:
            raise self._target.unavailable('sync', self._warning)
        return rows

    def _connect(self) -> None:
        """Connect; set what must hold: once, or in each transaction behind a pooler."""
        limits = (READ_WITHIN, 3) if self._to_read else (STATEMENT_WITHIN, LOCK_WITHIN)
        within = READ_WITHIN if self._to_read else ANSWER_WITHIN
        self._begin = ''
        self._watchdog = self._target.connect(within, to_read=self._to_read)
        connection = self._watchdog.connection
        connection.add_notice_handler(self._note)
        try:
            ((pid, level, encoding, off),) = self._execute(STATE)
            if encoding != 'UTF8':
                raise self._target.unavailable('table', f'the encoding is {encoding}')
            safe = level if level == 'remote_apply' else 'on'  # only that is safer
            # A policy that hides plants of a reader is then an error, no short list.
            settings = SETTINGS + self._to_read * 'SET {1} row_security TO off; '
            if pid == connection.info.backend_pid:  # a pooler makes one up
                kinds = 'SESSION CHARACTERISTICS AS TRANSACTION', 'SESSION'
                self._execute(settings.format(*kinds, safe, *limits))
            else:
                self._begin = settings.format('TRANSACTION', 'LOCAL', safe, *limits)
        except BaseException:
            self.close()
            raise
        if off and not self._to_read:
            lost = 'a crash of its machine may lose acknowledged plants'
            log.warning('%s: %s = off: %s', self._target.shown, ', '.join(off), lost)

    def _note(self, diagnostic: Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary

    @staticmethod
    def _has_ended(watchdog: Watchdog) -> bool:
        """Return whether the server has ended the session, or changed a setting."""
        idle = select.poll()
        idle.register(watchdog.connection.pgconn.socket, select.POLLIN)
        return bool(idle.poll(0))
