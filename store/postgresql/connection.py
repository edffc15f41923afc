"""A connection to the first host that takes plants: settings and time limits."""

import os
import select
import threading
from contextlib import suppress
from typing import Any, Self
from weakref import WeakSet

import psycopg
from psycopg import errors, generators, waiting
from psycopg._conninfo_attempts import conninfo_attempts
from psycopg._conninfo_utils import split_attempts
from psycopg.conninfo import make_conninfo

from store.postgresql.reasons import Fault, meaning

# In seconds. A caller waits for 5, whatever a batch waits for.
CONNECT_WITHIN = 2  # for each address, and as long for its first statements
ALL_WITHIN = 4  # for all addresses, each an equal share
STATEMENT_WITHIN = 3  # at the server, whose error says what happened
ANSWER_WITHIN = 3.8  # for a server that hangs, before the statement is cancelled
CANCEL_WITHIN = 0.8  # on top, until a cancelled statement ends
LOCK_WITHIN = 0.3  # while other plants of the batch wait
READ_WITHIN = 60  # for a page of plants

# What must hold, whatever the defaults of the role and the database.
SETTINGS = """SET {0} ISOLATION LEVEL READ COMMITTED;
SET {1} client_min_messages TO warning; SET {1} synchronous_commit TO {2};
SET {1} statement_timeout TO '{3}s'; SET {1} lock_timeout TO '{4}s'; """


class Connection(psycopg.Connection[Any]):
    """A connection on which no wait is long, and no commit unsafe."""

    is_spent = False  # a late cancel may hit the next statement
    _begin = ''  # of each transaction
    _within: float = ANSWER_WITHIN
    _warning: str | None = None

    @classmethod
    def open(cls, parameters: dict[str, Any], to_read: bool) -> Self:
        """Connect to the first host that takes plants; raise the words of each.

        A standby may lack the latest plants, so readers ask one only if they must.
        """
        for kind in ('read-write', 'any') if to_read else ('read-write',):
            found: dict[str, str] = {}  # words, and what they mean
            addresses: list[Any] = []
            for host in split_attempts({**parameters, 'target_session_attrs': kind}):
                try:
                    addresses += conninfo_attempts(host)
                except (psycopg.Error, UnicodeError) as ex:  # a label may be too long
                    found[f'{host.get("host")}: {ex}'] = '08'
            for address in addresses:
                within = max(0.1, min(CONNECT_WITHIN, ALL_WITHIN / len(addresses)))
                try:
                    return cls._open_one(make_conninfo('', **address), within, to_read)
                except psycopg.Error as ex:
                    name = f'{address.get("host")}:{address.get("port") or 5432}'
                    found[f'{name}: {str(ex).partition(chr(10))[0]}'] = meaning(ex)
        codes = {*found.values()}
        raise Fault(codes.pop() if len(codes) == 1 else 'hosts', '; '.join(found))

    @classmethod
    def _open_one(cls, conninfo: str, within: float, to_read: bool) -> Self:
        try:
            pgconn = waiting.wait_conn(generators.connect(conninfo), 0.1, within)
        except errors._WaitTimeout:
            raise Fault('08', f'no answer in {within:.2g} s') from None
        _open.add(connection := cls(pgconn))
        try:
            connection._within = within
            connection._configure(to_read)
        except BaseException:
            connection.close()
            raise
        connection._within = READ_WITHIN if to_read else ANSWER_WITHIN
        return connection

    def _configure(self, to_read: bool) -> None:
        """Set what must hold: once, or in each transaction behind a pooler."""
        self.autocommit = True
        self.add_notice_handler(self._note)
        if (name := self.info.parameter_status('server_encoding')) != 'UTF8':
            raise Fault('unfit', f'its encoding is {name}')
        ((pid, level),) = self.execute(
            "SELECT pg_backend_pid(), current_setting('synchronous_commit')"
        )
        safe = level if level == 'remote_apply' else 'on'  # only that is safer
        limits = (READ_WITHIN, 3) if to_read else (STATEMENT_WITHIN, LOCK_WITHIN)
        # A policy that hides plants of a reader is then an error, and no short list.
        settings = SETTINGS + to_read * 'SET {1} row_security TO off; '
        if pid == self.info.backend_pid:  # a pooler makes one up
            kinds = 'SESSION CHARACTERISTICS AS TRANSACTION', 'SESSION'
            self.execute(settings.format(*kinds, safe, *limits))
        else:
            self._begin = settings.format('TRANSACTION', 'LOCAL', safe, *limits)

    def has_ended(self) -> bool:
        """Return whether the server has ended the session, or changed a setting."""
        idle = select.poll()
        idle.register(self.pgconn.socket, select.POLLIN)
        return bool(idle.poll(0))

    def transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them."""
        self._warning = None
        begin += self._begin
        # NOTE: several statements are one message, in which nothing is prepared.
        kind = psycopg.ClientCursor if begin or ';' in statements else psycopg.Cursor
        rows: list[Any] = []
        try:
            for result in kind(self).execute(begin + statements, values).results():
                rows += result.fetchall() if result.description else ()
        except psycopg.Error:
            if self.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                self.rollback()  # of an explicit BEGIN
            raise
        # If its wait for a standby is cancelled, a commit succeeds, with a warning.
        if self._warning:
            raise Fault('sync', self._warning)
        return rows

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        try:
            return super().wait(gen, timeout=self._within)
        except errors._WaitTimeout:
            self.is_spent = True
        # Otherwise the session would go on waiting for a standby, though nobody needs
        # it. The answer to a cancellation says what the statement has waited for.
        with suppress(RuntimeError):  # there are no more threads
            threading.Thread(target=self._request_cancel, daemon=True).start()
        try:
            return super().wait(gen, timeout=CANCEL_WITHIN)
        except errors._WaitTimeout:
            raise Fault('57014', f'{self.info.host}: no answer') from None

    def _request_cancel(self) -> None:
        # PgBouncer 1.18 crashes if a client leaves while its cancel is under way.
        with suppress(psycopg.Error):
            self.cancel_safe(timeout=60)  # nobody waits for it

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary


_open: WeakSet[Connection] = WeakSet()


def _leave_to_parent() -> None:
    """Close the sockets of the parent in a child: its sessions would not end."""
    # NOTE: their numbers stay taken, since libpq in the child still knows them.
    null = os.open(os.devnull, os.O_RDWR)
    for connection in list(_open):
        with suppress(psycopg.Error):  # it is closed
            os.dup2(null, connection.pgconn.socket, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_leave_to_parent)
