"""A database over one connection, which is opened again if it was lost."""

import logging
import select
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import psycopg
from psycopg.errors import Diagnostic

from store import forks
from store.postgresql.database import Target, Unavailable
from store.postgresql.watchdog import CONNECT_WITHIN, Session, Watchdog

log = logging.getLogger(__name__)

# In seconds. A caller waits for 5, whatever a batch waits for.
ALL_WITHIN = 4  # for all hosts
STATEMENT_WITHIN = 3  # at the server, whose error says what happened
ANSWER_WITHIN = 3.6  # for a server that hangs, before the statement is cancelled
LOCK_WITHIN = 0.3  # while other plants of the batch wait
READ_WITHIN = 60  # for a page of plants
PAUSE = 0.03  # after an attempt to connect, which all that wait have shared

# What must hold, whatever the defaults of the role and the database.
SETTINGS = """SET {0} ISOLATION LEVEL READ COMMITTED;
SET {1} client_min_messages TO warning; SET {1} synchronous_commit TO {2};
SET {1} statement_timeout TO '{3}s'; SET {1} lock_timeout TO '{4}s'; """
# Whether a pooler shares the session, it takes plants, and its commits are durable.
STATE = """SELECT pg_backend_pid(), current_setting('transaction_read_only'),
current_setting('synchronous_commit'), array(SELECT name FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off')"""

IDLE, INERROR = psycopg.pq.TransactionStatus.IDLE, psycopg.pq.TransactionStatus.INERROR
Execute = Callable[[str], list[Any]]


class Connection:
    """Executes transactions, for one thread at a time; none takes long.

    ``ask`` gets a function that executes statements over each new connection.
    """

    def __init__(
        self, target: Target, ask: Callable[[Execute], None], *, to_read: bool
    ) -> None:
        self._target, self._ask, self._to_read = target, ask, to_read
        self._hosts = [*target.hosts]  # those that were late are the last
        self._host: dict[str, Any] = {}  # which was tried last
        self._watchdog: Watchdog | None = None  # of the open connection
        self._begin = ''  # of each transaction
        self._warning: str | None = None

    def transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them.

        If the server refuses, and a new connection may help, execute them once more.
        """
        if self._watchdog is not None and self._has_ended(self._watchdog.connection):
            self.close()
        was_open = self._watchdog is not None
        self.open()
        try:
            return self._execute(statements, *values, begin=begin)
        except Unavailable as ex:
            if ex.retry != 'connect' or not was_open or self._watchdog is None:
                raise
        self.close()
        return self.transact(statements, *values, begin=begin)

    def open(self) -> None:
        """Connect and ask, unless that is done."""
        if self._watchdog is None:
            try:
                self._connect()
                self._ask(self._execute)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.close()
            if watchdog.is_late:
                self._put_last()

    def _execute(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements over the open connection."""
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
        """Connect to the first host that takes plants; raise the words of each."""
        found: dict[str, str] = {}  # and what they mean
        until = time.monotonic() + ALL_WITHIN
        # A standby may lack the latest plants, so readers ask one only if they must.
        goals = ('write', 'read') if self._to_read else ('write',)
        for goal, host in product(goals, [*self._hosts]):
            if (began := time.monotonic()) > until - CONNECT_WITHIN / 2 and found:
                break  # the next attempt begins with it
            self._host = host
            try:
                return self._open_host(goal)
            except Unavailable as ex:
                self.close()
                if time.monotonic() > began + CONNECT_WITHIN:
                    self._put_last()
                name = f'{host.get("host")}:{host.get("port") or 5432}'
                found[f'{name}: {ex.detail}'] = ex.code
        time.sleep(PAUSE)
        code, *others = {*found.values()}
        raise self._target.unavailable('hosts' if others else code, '; '.join(found))

    def _open_host(self, goal: str) -> None:
        """Connect; set what must hold: once, or in each transaction behind a pooler."""
        try:
            self._target.check_files()
            forks.fill_standard()
            connection = psycopg.connect(autocommit=True, **self._host)
            self._watchdog = Watchdog(connection, self._target.scheduler)
        except psycopg.Error as ex:
            raise self._target.explain(ex) from None
        except (OSError, RuntimeError, UnicodeError) as ex:  # no room, or a wrong name
            raise self._target.unavailable('08', str(ex)) from None
        self._begin = ''
        connection.add_notice_handler(self._note)
        if (name := connection.info.parameter_status('server_encoding')) != 'UTF8':
            raise self._target.unavailable('unfit', f'its encoding is {name}')
        ((pid, read_only, level, off),) = self._execute(STATE)
        if read_only == 'on' and goal == 'write':
            raise self._target.unavailable('25006', 'it is read-only')
        safe = level if level == 'remote_apply' else 'on'  # only that is safer
        limits = (READ_WITHIN, 3) if self._to_read else (STATEMENT_WITHIN, LOCK_WITHIN)
        # A policy that hides plants of a reader is then an error, and no short list.
        settings = SETTINGS + self._to_read * 'SET {1} row_security TO off; '
        if pid == connection.info.backend_pid:  # a pooler makes one up
            kinds = 'SESSION CHARACTERISTICS AS TRANSACTION', 'SESSION'
            self._execute(settings.format(*kinds, safe, *limits))
        else:
            self._begin = settings.format('TRANSACTION', 'LOCAL', safe, *limits)
        self._watchdog.within = READ_WITHIN if self._to_read else ANSWER_WITHIN
        if off and not self._to_read:
            lost = 'a crash of its machine may lose acknowledged plants'
            log.warning('%s: %s = off: %s', self._target.shown, ', '.join(off), lost)

    def _put_last(self) -> None:
        self._hosts.remove(self._host)
        self._hosts.append(self._host)

    def _note(self, diagnostic: Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary

    @staticmethod
    def _has_ended(session: Session) -> bool:
        """Return whether the server has ended it, or changed a setting."""
        idle = select.poll()
        idle.register(session.pgconn.socket, select.POLLIN)
        return bool(idle.poll(0))
