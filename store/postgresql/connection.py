"""A connection to a database: its settings, and its limits of time."""

import logging
import os
import select
import socket
import time
from contextlib import suppress
from math import inf
from typing import Any

import psycopg
from psycopg.errors import Diagnostic
from psycopg.pq import TransactionStatus

from store.postgresql.database import FILES, Target

log = logging.getLogger(__name__)

# In seconds. A caller waits for 5, of which a connection to a frozen host takes 2.
STATEMENT_WITHIN = 2  # at the server, whose error says what happened
ANSWER_WITHIN = 2.2  # for a server that hangs, before the statement is cancelled
CANCEL_WITHIN = 0.4  # on top, until a cancelled statement ends
LOCK_WITHIN = 0.2  # while other plants of the batch wait
READ_WITHIN = 60  # for a page of plants

# What must hold, whatever the defaults of the role and the database.
SETTINGS = """SET {0} ISOLATION LEVEL READ COMMITTED;
SET {1} client_min_messages TO warning; SET {1} synchronous_commit TO {2};
SET {1} statement_timeout TO '{3}s'; SET {1} lock_timeout TO '{4}s'; """
# Whether a pooler shares the session, and what may lose plants or lack the latest.
STATE = """SELECT pg_backend_pid(), current_setting('synchronous_commit'),
(SELECT string_agg(it, ', ') FROM pg_settings, concat(name, ' = ', setting) AS it
WHERE it IN ('fsync = off', 'full_page_writes = off', 'data_sync_retry = on',
'zero_damaged_pages = on', 'ignore_checksum_failure = on', 'in_hot_standby = on'))"""


class Connection:
    """An open connection: no statement takes long, and no commit is unsafe.

    A thread watches it. A statement that is late is cancelled, since its answer says
    what it waited for; if it goes on the socket is shut down. A cancellation might hit
    the next statement, so the connection is *spent* then: another one is opened.
    """

    ask_at = 0.0  # when the table is to be asked
    _begin = ''  # of each transaction
    _due = inf  # when its statement is late
    _is_spent = False
    _warning: str | None = None

    def __init__(self, target: Target, to_read: bool) -> None:
        self._target = target
        self._within = READ_WITHIN if to_read else ANSWER_WITHIN
        self._closing = target.scheduler.allocate_lock()
        self._closing.acquire()  # ``close`` releases it
        self._session = target.connect(to_read=to_read)
        self._session.add_notice_handler(self._note)
        try:
            target.scheduler.start_thread(self._watch, ())
            self._configure(to_read)
        except BaseException:
            self.close()
            raise

    def _configure(self, to_read: bool) -> None:
        """Set what must hold: once, or in each transaction behind a pooler."""
        ((pid, level, unsafe),) = self.execute(STATE)
        safe = level if level == 'remote_apply' else 'on'  # only that is safer
        limits = (READ_WITHIN, 3) if to_read else (STATEMENT_WITHIN, LOCK_WITHIN)
        # A policy that hides plants of a reader is then an error, and no short list.
        settings = SETTINGS + to_read * 'SET {1} row_security TO off; '
        if pid == self._session.info.backend_pid:  # a pooler makes one up
            kinds = 'SESSION CHARACTERISTICS AS TRANSACTION', 'SESSION'
            self.execute(settings.format(*kinds, safe, *limits))
        else:
            self._begin = settings.format('TRANSACTION', 'LOCAL', safe, *limits)
        if unsafe:
            log.warning('%s may lose or lack plants: %s', self._target.shown, unsafe)
        libpq, files = self._session.pgconn, map(self._target.get, FILES)
        if not (libpq.ssl_in_use or libpq.host.startswith(b'/')) and any(files):
            words = 'is not encrypted, but a certificate or key is named: see sslmode'
            log.warning('%s: the connection %s', self._target.shown, words)

    def execute(self, statements: str, *values: str) -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them."""
        statements = self._begin + statements
        # NOTE: several statements are one message, in which nothing is prepared.
        kind = psycopg.ClientCursor if ';' in statements else psycopg.Cursor
        self._warning = None
        self._due = time.monotonic() + self._within
        try:
            cursor = kind(self._session).execute(statements, values)
            rows = [row for it in cursor.results() if it.description for row in it]
        except psycopg.Error as ex:
            if self._session.pgconn.transaction_status == TransactionStatus.INERROR:
                with suppress(psycopg.Error):
                    self._session.rollback()  # of an explicit BEGIN
            self._due = inf
            raise self._target.explain(ex) from None  # NOTE: psycopg's has DETAIL
        self._due = inf  # not in a finally: an interrupt may leave psycopg its lock
        # If its wait for a standby is cancelled, a commit succeeds, with a warning.
        if self._warning:
            raise self._target.unavailable('sync', self._warning)
        return rows

    def is_usable(self) -> bool:
        """Return whether the server has neither ended it nor changed a setting."""
        status = self._session.pgconn.transaction_status
        if self._is_spent or self._due < inf or status != TransactionStatus.IDLE:
            return False
        idle = select.poll()
        idle.register(self._session.pgconn.socket, select.POLLIN)
        return not idle.poll(0)

    def close(self) -> None:
        self._closing.release()
        self._session.close()

    def _note(self, diagnostic: Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary

    def _watch(self) -> None:
        try:
            while time.monotonic() <= self._due:
                if self._closing.acquire(timeout=0.1):
                    return
        finally:  # also for want of memory: what nobody watches is not used again
            self._is_spent = True
        with suppress(RuntimeError):  # there may be no more threads
            self._target.scheduler.start_thread(self._cancel, ())
        while not self._closing.acquire(timeout=CANCEL_WITHIN):
            with suppress(OSError, psycopg.Error):  # no descriptor, or no socket
                self._shut_down()
                return

    def _cancel(self) -> None:
        # PgBouncer 1.18 crashes if a client leaves while its cancel is under way.
        with suppress(psycopg.Error):
            self._session.cancel_safe(timeout=60)  # nobody waits for it

    def _shut_down(self) -> None:
        with socket.socket(fileno=os.dup(self._session.pgconn.socket)) as duplicate:
            # If libpq has closed it, another file may have got its number: this raises.
            if self._session.pgconn.socket:
                duplicate.shutdown(socket.SHUT_RDWR)
