"""A connection to the first host that takes plants: settings, time limits, names."""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg import errors, generators, waiting
from psycopg._conninfo_utils import get_param, split_attempts
from psycopg.conninfo import make_conninfo, timeout_from_conninfo

from store.postgresql.reasons import Fault, explain

log = logging.getLogger(__name__)
# The store reports a lost connection itself; psycopg's own warning would repeat it.
logging.getLogger('psycopg').addHandler(logging.NullHandler())

Result = TypeVar('Result')
Lookup = tuple[Future[list[dict[str, str]]], float]  # addresses, until when to wait

# Time limits in seconds.
ANSWER_WITHIN = 4  # of a call in all: names, connection, statements
RESOLVE_WITHIN = 2  # of these seconds for all names
CONNECT_WITHIN = 2  # of these seconds for each host
STATEMENT_WITHIN = 3  # at the server, whose error says what happened
CANCEL_WITHIN = 0.8  # on top, until a cancelled statement ends
CANCEL_ENDS_WITHIN = 60  # for the cancel request, for which nobody waits
LOCK_WITHIN = 0.3  # while other plants of the batch wait

IDLE = psycopg.pq.TransactionStatus.IDLE  # never of a connection that is lost

WRITABLE = "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')"
# Leaves out settings that the server lacks (NULL). Only remote_apply is safer than on.
SET = """SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[])
AS wanted (name, value) WHERE current_setting(name, true) <> 'remote_apply'"""
# What must hold, whatever the defaults of the role and the database.
SETTINGS = {
    'synchronous_commit': 'on',
    'client_min_messages': 'warning',  # of a commit that is not safe
    'array_nulls': 'on',  # otherwise NULL in an array is a text
    # A stricter level only adds failures. The strictest cannot read a standby.
    'default_transaction_isolation': 'read committed',
    'exit_on_error': 'off',
    'idle_session_timeout': '0',  # these could end an idle session, or a read
    'idle_in_transaction_session_timeout': '0',
    'transaction_timeout': '0',
    'statement_timeout': f'{STATEMENT_WITHIN}s',
    'lock_timeout': f'{1000 * LOCK_WITHIN:.0f}ms',  # PostgreSQL 11 reads no fractions
}
# Reading all plants takes as long as the reader likes.
READER_SETTINGS = {'statement_timeout': '0', 'lock_timeout': f'{STATEMENT_WITHIN}s'}

_cancels = threading.BoundedSemaphore(3)  # cancel requests that are under way


class Hosts:
    """The hosts of a URL, and the lookups of their names."""

    def __init__(self, parameters: dict[str, Any], url: str) -> None:
        self._parameters = parameters
        self._url = url
        self._lookups: dict[str, Lookup] = {}

    def connect(self, deadline: float, *, to_read: bool) -> 'Connection':
        """Return a connection to the first host that takes plants, or can be read.

        Raises:
            psycopg.Error: No host does. If there are several, the words name each.
        """
        hosts = split_attempts(self._parameters)
        lookups = [self._look_up(host) for host in hosts]  # all at once
        longest = timeout_from_conninfo(self._parameters)
        share = (deadline - time.monotonic()) / len(hosts)
        words = []
        for host, (lookup, until) in zip(hosts, lookups, strict=True):
            try:
                *others, last = lookup.result(max(0, until - time.monotonic()))
                within = min(longest, share / (len(others) + 1))
                for each in others:
                    with suppress(psycopg.OperationalError):
                        return Connection.open(host | each, within, deadline, to_read)
                return Connection.open(host | last, within, deadline, to_read)
            except psycopg.OperationalError as ex:
                error = ex
            except TimeoutError:
                error = Fault('08', f'the name did not resolve in {RESOLVE_WITHIN} s')
            except (OSError, UnicodeError, RuntimeError) as ex:
                error = Fault('08', f'the name does not resolve: {ex}')
            if len(hosts) == 1:
                raise error
            name = get_param(host, 'host') or get_param(host, 'hostaddr')
            place = f'{name}:{get_param(host, "port") or 5432}'
            words.append(f'{place}: {explain(error, url=self._url).detail}')
        raise Fault('hosts', '; '.join(words))

    def _look_up(self, host: Any) -> Lookup:
        """Resolve a name in a thread that may be left behind: a lookup may hang."""
        name = str(get_param(host, 'host') or '')
        found, until = self._lookups.get(name, (None, 0.0))
        if found is None or found.done():  # one that hangs is not repeated
            found, until = Future(), time.monotonic() + RESOLVE_WITHIN
            if not name or name[0] in '/@' or get_param(host, 'hostaddr'):
                found.set_result([{}])  # a Unix socket, or an address
            elif not _start_thread(_resolve, name, found):
                found.set_exception(RuntimeError('no thread can be started'))
            self._lookups[name] = found, until
        return found, until


def _resolve(name: str, found: Future[list[dict[str, str]]]) -> None:
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found.set_result([{'hostaddr': str(address[0])} for *_, address in addresses])
    except (OSError, UnicodeError) as ex:
        found.set_exception(ex)


class Connection(psycopg.Connection[Any]):
    """A connection whose statements run with the settings that must hold.

    A session of its own gets the settings once, and keeps prepared statements. A pooler
    such as PgBouncer may execute each transaction in another session: there each begins
    with the settings, in one message, and leaves nothing behind. The process id in the
    login tells the two cases apart: a pooler makes one up.
    """

    lost_cancels = 0  # of all connections
    is_pooled = True  # each transaction may be in another session, as far as is known
    _settings = ''  # with which a transaction begins behind a pooler
    _deadline = math.inf  # for all waits of a use
    _warning: str | None = None  # of a use
    timed_out = False  # its last use; the next one gets another connection
    _cancel_was_delivered = False

    @classmethod
    def open(cls, host: Any, within: float, deadline: float, to_read: bool) -> Self:
        """Connect to a host within some seconds; libpq allows no fewer than two."""
        connecting = generators.connect(make_conninfo('', **host))
        try:
            connection = cls(waiting.wait_conn(connecting, 0.1, within))
        except errors._WaitTimeout:
            raise Fault('08', f'no answer within {within:.2g} s') from None
        try:
            connection.start_use(min(deadline, time.monotonic() + CONNECT_WITHIN))
            connection._configure(to_read)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, to_read: bool) -> None:
        """Prepare for statements that add plants or read them all."""
        self.autocommit = True
        self.add_notice_handler(self._note)
        wanted = SETTINGS | READER_SETTINGS if to_read else SETTINGS
        settings = [list(wanted), list(wanted.values())]
        values = [False, *settings, self.info.backend_pid]
        found = self.execute(f'{SET} AND pg_backend_pid() = %s', values)
        if found.rowcount:
            self.is_pooled = False
        else:
            # A pooler in statement mode refuses a transaction.
            self.execute('BEGIN')
            self.execute('COMMIT')
            begin = f'SET TRANSACTION ISOLATION LEVEL READ COMMITTED; {SET}; '
            values = [True, *settings]
            self._settings = psycopg.ClientCursor(self).mogrify(begin, values)
        if not to_read:
            ((is_standby, read_only),) = self.execute(WRITABLE).fetchall()
            if is_standby:
                raise Fault('standby', 'a standby (read-only)')
            if read_only == 'on':
                raise Fault('primary', 'the primary is read-only')

    def start_use(self, deadline: float) -> None:
        """Set a new deadline, and forget what an earlier use was warned of."""
        self._deadline, self._warning = deadline, None

    def transact(self, statements: str, *values: str) -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them."""
        cursor = psycopg.ClientCursor(self)
        settings = self._settings if self.info.transaction_status == IDLE else ''
        # NOTE: as one message of the simple protocol. A pipeline costs twice the CPU.
        cursor.execute(settings + statements, values)
        found = [result.fetchall() for result in cursor.results() if result.description]
        rows_of_ours = found[1:] if settings else found
        return [row for rows in rows_of_ours for row in rows]

    # psycopg passes more arguments only for notifies(), which is not used.
    def wait(self, gen: Generator[Any, Any, Result], *_: Any, **__: Any) -> Result:
        left = max(0.001, self._deadline - time.monotonic())
        try:
            result = super().wait(gen, timeout=min(ANSWER_WITHIN, left))
        except errors._WaitTimeout as ex:
            if self.timed_out:  # it has not ended after a cancellation either
                if self._cancel_was_delivered and self.is_pooled:
                    words = 'the login was answered, and the statement was not'
                    raise Fault('pool', words) from ex
                raise Fault('08', f'{self.info.host}: no answer') from ex
            self._cancel()
            result = self.wait(gen)
        # If its wait for a standby is cancelled, a commit succeeds, with a warning.
        if self._warning:
            raise Fault('sync', self._warning)
        return result

    def _cancel(self) -> None:
        self.timed_out = True
        self._deadline = time.monotonic() + CANCEL_WITHIN
        # The answer to a cancellation says what the statement has waited for. Without
        # one the session would go on waiting, though no client needs it.
        if _cancels.acquire(blocking=False) and not _start_thread(self._request_cancel):
            _cancels.release()

    def _request_cancel(self) -> None:
        """Ask the server to cancel, in a thread of its own.

        PgBouncer 1.18 crashes if a client leaves while its cancel request is under way.
        """
        try:
            self.cancel_safe(timeout=CANCEL_ENDS_WITHIN)
            self._cancel_was_delivered = True
        except psycopg.Error as ex:
            Connection.lost_cancels += 1
            kind, count = type(ex).__name__, Connection.lost_cancels
            log.warning('a cancel request failed: %s (%s so far)', kind, count)
        finally:
            _cancels.release()

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary


def _start_thread(target: Callable[..., None], *arguments: object) -> bool:
    """Start a thread for which an exit does not wait; return whether it started."""
    try:
        threading.Thread(target=target, args=arguments, daemon=True).start()
    except RuntimeError:
        return False
    return True
