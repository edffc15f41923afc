"""A connection to a PostgreSQL server: the statements, and the meaning of errors."""

import logging
import math
import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import args_row

from store.base import ID_MAX, ID_MIN, Plant
from store.errors import StoreUnavailable

# The store reports a lost connection itself; psycopg's own warning would repeat it.
logging.getLogger('psycopg').addHandler(logging.NullHandler())

Result = TypeVar('Result')

# Time limits in seconds.
CONNECT_WITHIN = 2
STATEMENT_WITHIN = 4  # at the server, whose error says what happened
ANSWER_WITHIN = 5
CANCEL_WITHIN = 1
LOCK_WITHIN = 0.3  # while other plants of the batch wait

CREATE_TABLE = """CREATE TABLE IF NOT EXISTS plants
(id bigint PRIMARY KEY, name text NOT NULL, tag text)"""
# Changes nothing, and needs what an add needs: columns, a unique id, rights, writes.
PROBE = """INSERT INTO plants (id, name, tag)
SELECT id, name, tag FROM plants WHERE false FOR UPDATE ON CONFLICT (id) DO NOTHING"""
# Write no row, but their commit waits for what that of an add waits for. The second is
# for a server without that function; it waits for nothing if the table is empty.
EMIT_MESSAGE = "SELECT pg_logical_emit_message(true, 'plants', '')"
LOCK_ANY = 'SELECT id FROM plants LIMIT 1 FOR UPDATE SKIP LOCKED'
# Not VALUES: each size of a batch would be a prepared statement of its own, 2 to 8 MiB
# for 100 sizes. Without casts a prepared statement fails for good after ALTER COLUMN.
INSERT = """INSERT INTO plants (id, name, tag)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[])
ON CONFLICT (id) DO NOTHING RETURNING id::bigint"""
INSERT_LITERALS = re.sub(r'\$\d', '%s', INSERT)
READ = 'SELECT id::bigint, name::text, tag::text FROM plants'
PAGE = 1000  # plants
READ_FROM = f'{READ} WHERE id >= %s ORDER BY id LIMIT {PAGE}'
# One row each, since a distributed engine can lock no more with one statement.
LOCK = f'{READ} WHERE id = %s FOR UPDATE'
# Leaves out settings that the server lacks (NULL). Only remote_apply is safer than on.
SET = """SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[])
AS wanted (name, value) WHERE current_setting(name, true) <> 'remote_apply'"""
# What must hold, whatever the defaults of the role and the database.
SETTINGS = {
    'synchronous_commit': 'on',
    'client_min_messages': 'warning',  # one tells of a commit that is not safe
    'array_nulls': 'on',  # otherwise NULL in an array is a text
    # A stricter level only adds failures, and cannot read a standby.
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

# How SQLSTATE begins if the connection, a resource or the time is at fault. Any other
# error may be the fault of one plant: a trigger chooses its SQLSTATE freely.
NOT_OF_ONE_PLANT = ('08', '25', '26000', '40003', '42P05', '53', '57', '58')

# By SQLSTATE or its class. A client sees these; the log has the server's words, too.
REASONS = {
    **dict.fromkeys(
        ('22', '23', '44', '54', 'P0'), 'a rule of the table plants does not permit it'
    ),
    '08': 'there is no connection to the database',
    '25006': 'the database is read-only',
    **dict.fromkeys(('26000', '42P05'), 'a connection pooler has mixed up sessions'),
    '40': 'the database is busy with other changes of the same plants',
    '40003': 'the database does not say whether the plant is safe',
    '42': 'the database does not permit it',
    '42P01': 'there is no table plants',
    '53': 'the database is out of room',
    '55P03': 'another session has locked the plant',
    '57': 'the database is shutting down or starting up',
    '57014': 'the database did not answer in time',
}
# By words of libpq, the server, PgBouncer, or this module; the first that is found.
NOT_CONFIRMED = 'the commit had to wait for a synchronous standby'
UNSERVED = 'the login was answered, and the statement was not'
WORDS = {
    'session is read-only': REASONS['25006'],
    NOT_CONFIRMED: 'a synchronous standby of the database does not confirm commits',
    f'{UNSERVED}|query_wait_timeout': (
        'the connection pool of the database is full, or does not reach the database'
    ),
    'too many c': 'the database allows no more connections',
    'no more connections allowed': 'the connection pooler allows no more connections',
    'startup parameter': 'the connection pooler does not accept a parameter of the URL',
    'statement pooling': 'the connection pooler is in statement mode, not transaction',
}


class Refused(StoreUnavailable):
    """The database refuses a statement; one plant of it may be the cause."""


@contextmanager
def explained(store: str) -> Iterator[None]:
    """Turn errors of psycopg into ``StoreUnavailable`` of the store of this name."""
    try:
        yield
    except psycopg.Error as ex:
        code, detail = ex.sqlstate or '08', ' '.join(str(ex).split())
        reason = REASONS.get(code[:2], f'the database refuses it ({code})')
        reason = REASONS.get(code, reason)
        if not code.startswith(NOT_OF_ONE_PLANT):
            raise Refused(reason, store=store, detail=detail) from ex
        reason = next((WORDS[it] for it in WORDS if re.search(it, detail)), reason)
        raise StoreUnavailable(reason, store=store, detail=detail) from ex


class Connection(psycopg.Connection[Any]):
    """A connection whose statements run with the settings that must hold.

    A session of its own gets them once, and keeps prepared statements. A pooler such as
    PgBouncer may execute each transaction in another session, which its clients share:
    there each brings them with it, in the same message, and leaves nothing behind.
    The process id of the login tells them apart. That of a pooler is a number of its
    own, so that a cancellation finds the session that the client has at that time.
    """

    timed_out = False  # in this use
    _settings = ''  # with which a transaction begins; none in a session of its own
    _trace = EMIT_MESSAGE  # what a probe commits
    _deadline = math.inf  # for all waits of a use
    _warning: str | None = None

    def start_use(self) -> None:
        """Set a new deadline, and forget what happened in an earlier use."""
        self._deadline = time.monotonic() + ANSWER_WITHIN
        self.timed_out, self._warning = False, None

    # psycopg passes more arguments only for notifies(), which is not used.
    def wait(self, gen: Generator[Any, Any, Result], *_: Any, **__: Any) -> Result:
        left = max(0.001, self._deadline - time.monotonic())
        try:
            result = super().wait(gen, timeout=min(ANSWER_WITHIN, left))
        except errors._WaitTimeout as ex:
            if self.timed_out:
                # Only a session of its own prepares statements: not that of a pooler.
                silence = UNSERVED if self.prepare_threshold is None else 'no answer'
                raise psycopg.OperationalError(silence) from ex
            # The answer to a cancellation says what the statement has waited for.
            # Not cancelled, the session would go on waiting for no client.
            self.timed_out = True
            self._deadline = time.monotonic() + CANCEL_WITHIN
            self.cancel_safe(timeout=CANCEL_WITHIN)
            result = self.wait(gen)
        # The server reports a commit that it no longer waits for as done, and warns.
        if self._warning:
            raise errors.StatementCompletionUnknown(f'{NOT_CONFIRMED}: {self._warning}')
        return result

    def configure(self, *, to_read: bool) -> None:
        """Prepare for statements that add plants or read them all."""
        self.add_notice_handler(self._note)
        wanted = SETTINGS | READER_SETTINGS if to_read else SETTINGS
        settings = [list(wanted), list(wanted.values())]
        self._deadline = time.monotonic() + CONNECT_WITHIN
        values = [False, *settings, self.info.backend_pid]
        found = self.execute(f'{SET} AND pg_backend_pid() = %s', values)
        self._deadline = math.inf
        if found.rowcount:
            self.prepare_threshold = 5  # as psycopg has it
            return
        # A pooler in statement mode refuses a transaction.
        self.execute('BEGIN')
        self.execute('COMMIT')
        begin = f'SET TRANSACTION ISOLATION LEVEL READ COMMITTED; {SET}; '
        self._settings = psycopg.ClientCursor(self).mogrify(begin, [True, *settings])

    def transact(self, statements: str, *values: str) -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them."""
        cursor = psycopg.ClientCursor(self)
        # NOTE: as one message of the simple protocol. A pipeline costs twice the CPU.
        cursor.execute(self._settings + statements, values)
        found = [result.fetchall() for result in cursor.results() if result.description]
        return [row for rows in found[bool(self._settings) :] for row in rows]

    def check_table(self, *, may_create: bool) -> None:
        """Check that plants can be added; make the table if it is missing."""
        try:
            self.transact(PROBE)
        except errors.UndefinedTable:
            if not may_create:
                raise
            # Another process may be making it.
            with suppress(
                errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
            ):
                self.transact(CREATE_TABLE)
            self.transact(PROBE)

    def probe(self, commits: bool) -> None:
        """Check that plants can be added, and perhaps that a commit ends."""
        try:
            self.transact(f'{PROBE}; {self._trace}' if commits else PROBE)
        except (errors.UndefinedFunction, errors.InsufficientPrivilege):
            self.transact(f'{PROBE}; {LOCK_ANY}')
            self._trace = LOCK_ANY

    def read_plants(self) -> Iterator[Plant]:
        if not self._settings:
            yield from self.cursor(row_factory=args_row(Plant)).stream(READ, size=PAGE)
            return
        # Pages take five times as long, but a slow reader keeps no session of the pool.
        first = ID_MIN
        while first <= ID_MAX and (rows := self.transact(READ_FROM, str(first))):
            yield from (Plant(*row) for row in rows)
            first = rows[-1][0] + 1

    def insert_plants(self, plants: Sequence[Plant]) -> list[int]:
        """Insert plants whose id is free, and commit; return their ids."""
        ids, names, tags = zip(*plants, strict=True)
        # psycopg's own arrays take twice the time, and JSON a seventh more.
        arrays = [texts_array(each) for each in (map(str, ids), names, tags)]
        if self._settings:
            rows = self.transact(INSERT_LITERALS, *arrays)
        else:
            rows = psycopg.RawCursor(self).execute(INSERT, arrays).fetchall()
        return [id for (id,) in rows]

    def lock_plants(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with the ids of plants, once they are safe.

        A commit that was cut off while it waited for a synchronous standby is visible
        but not safe. Reading would not wait for the standby; the commit of a lock does.
        """
        ids = [str(plant.id) for plant in plants]
        rows = self.transact('; '.join([LOCK] * len(ids)), *ids)
        if len(rows) < len(plants):  # one of them was deleted, or is not visible yet
            raise errors.SerializationFailure('the conflicting row is not visible')
        return {row[0]: Plant(*row) for row in rows}

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        if diagnostic.source_file == 'syncrep.c':  # a trigger may raise its SQLSTATE
            self._warning = diagnostic.message_primary


def texts_array(texts: Iterable[str | None]) -> str:
    """Return the literal of an SQL array of texts."""
    escaped = [t and t.replace('\\', '\\\\').replace('"', '\\"') for t in texts]
    return '{' + ','.join(['NULL' if t is None else f'"{t}"' for t in escaped]) + '}'
