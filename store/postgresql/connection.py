"""A connection to a PostgreSQL server: the statements, and the meaning of errors."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import args_row

from store.base import ID_MAX, ID_MIN, Plant
from store.errors import StoreUnavailable

# The store reports a lost connection itself; psycopg's own warning would repeat it.
logging.getLogger('psycopg').addHandler(logging.NullHandler())

Result = TypeVar('Result')

# Time limits in seconds.
CONNECT_WITHIN = 2
# For one statement: the limit of the server, and ours. The server's is shorter, because
# its error says what happened.
STATEMENT_WITHIN = 4
ANSWER_WITHIN = 5
CANCEL_WITHIN = 1
# For a lock that another session holds: other plants wait in the same batch.
LOCK_WITHIN = 0.3

READ_AT_ONCE = 1000  # plants

CREATE_TABLE = (
    'CREATE TABLE IF NOT EXISTS plants '
    '(id bigint PRIMARY KEY, name text NOT NULL, tag text)'
)
# Changes nothing, but fails where an add would fail: it needs a table of these columns
# and a unique id, the rights to insert and to lock, and a server that takes writes.
PROBE = (
    'INSERT INTO plants (id, name, tag) SELECT id, name, tag FROM plants WHERE false '
    'FOR UPDATE ON CONFLICT (id) DO NOTHING'
)
# Write no row, but their commit waits for what that of an add waits for. The second is
# for a server without that function; an empty table has nothing to lock.
EMIT_MESSAGE = "SELECT pg_logical_emit_message(true, 'plants', '')"
LOCK_ANY = 'SELECT id FROM plants LIMIT 1 FOR UPDATE SKIP LOCKED'
# One statement for all sizes of a batch. With VALUES each number of rows would be a
# statement of its own, and the server keeps a plan of each in every session (2 to 8 MiB
# for 100 sizes).
# The casts hold the types of the results: a prepared statement whose result type
# changes, because a column was altered, fails for as long as its session lives.
INSERT = (
    'INSERT INTO plants (id, name, tag) '
    'SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[]) '
    'ON CONFLICT (id) DO NOTHING RETURNING id::bigint'
)
INSERT_LITERALS = re.sub(r'\$\d', '%s', INSERT)
READ = 'SELECT id::bigint, name::text, tag::text FROM plants'
READ_FROM = f'{READ} WHERE id >= %s ORDER BY id LIMIT {READ_AT_ONCE}'
# One row each, since a distributed engine can lock no more with one statement.
LOCK = f'{READ} WHERE id = %s FOR UPDATE'
# A setting that the server does not have is NULL, and is left out. remote_apply is the
# one value that is kept: no other commit is safer than "on".
SET = (
    'SELECT set_config(name, value, {}) FROM unnest(%s::text[], %s::text[]) '
    "AS wanted (name, value) WHERE current_setting(name, true) <> 'remote_apply'"
)
SET_IN_SESSION = SET.format('false') + ' AND pg_backend_pid() = %s'
SET_IN_TRANSACTION = (
    'SET TRANSACTION ISOLATION LEVEL READ COMMITTED; ' + SET.format('true') + '; '
)
# What must hold for a statement, whatever its role or its database has as a default.
SETTINGS = {
    'synchronous_commit': 'on',
    # A warning tells of a commit that is not safe.
    'client_min_messages': 'warning',
    # Otherwise an array holds the text 'NULL' for a plant without a tag.
    'array_nulls': 'on',
    # A stricter level only adds failures, and cannot read a standby.
    'default_transaction_isolation': 'read committed',
    'exit_on_error': 'off',
    # Limits that could end a session between two uses, or a long read.
    'idle_session_timeout': '0',
    'idle_in_transaction_session_timeout': '0',
    'transaction_timeout': '0',
    'statement_timeout': f'{STATEMENT_WITHIN}s',
    # A whole number: engines of PostgreSQL 11 read no fractions.
    'lock_timeout': f'{1000 * LOCK_WITHIN:.0f}ms',
}
# Reading all plants takes as long as the reader likes.
READER_SETTINGS = {'statement_timeout': '0', 'lock_timeout': f'{STATEMENT_WITHIN}s'}

# Errors of the connection, of a resource or of the time, by the beginning of SQLSTATE.
# Any other error may be the fault of one plant: a rule, a policy or a trigger may
# choose its SQLSTATE freely.
NOT_OF_ONE_PLANT = ('08', '25', '26000', '40003', '42P05', '53', '57', '58')

# By SQLSTATE or its class. A client sees these words; the log also has the server's.
REASONS: dict[str | None, str] = {
    **dict.fromkeys(
        ('22', '23', '44', '54', 'P0'), 'a rule of the table plants does not permit it'
    ),
    **dict.fromkeys((None, '08'), 'there is no connection to the database'),
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
# By words of libpq, the server, PgBouncer, or this module.
NOT_CONFIRMED = 'the commit had to wait for a synchronous standby'
UNSERVED = 'the login was answered, and the statement was not'
POOL_FULL = (
    'the connection pool of the database is full, or does not reach the database'
)
REASONS_IN_WORDS = {
    'session is read-only': REASONS['25006'],
    NOT_CONFIRMED: 'a synchronous standby of the database does not confirm commits',
    UNSERVED: POOL_FULL,
    'query_wait_timeout': POOL_FULL,
    'too many c': 'the database allows no more connections',
    'no more connections allowed': 'the connection pooler allows no more connections',
    'startup parameter': 'the connection pooler does not accept a parameter of the URL',
    'statement pooling': 'the connection pooler is in statement mode, not transaction',
}


@contextmanager
def explained(store: str) -> Iterator[None]:
    """Turn errors of psycopg into ``StoreUnavailable`` of the store of this name."""
    try:
        yield
    except psycopg.Error as ex:
        code, detail = ex.sqlstate, ' '.join(str(ex).split())
        reason = REASONS.get(code) or REASONS.get(code and code[:2])
        if code is None or code.startswith(NOT_OF_ONE_PLANT):
            in_words = (REASONS_IN_WORDS[it] for it in REASONS_IN_WORDS if it in detail)
            reason = next(in_words, reason)
        reason = reason or f'the database refuses it ({code})'
        raise StoreUnavailable(reason, store=store, detail=detail) from ex


class Connection(psycopg.Connection[Any]):
    """A connection whose statements run with the settings that must hold.

    A session of its own gets the settings once, and may keep prepared statements. A
    pooler such as PgBouncer may execute each transaction in another session, which its
    clients share. There every transaction brings its settings with it, in the same
    message, and leaves nothing behind.

    The process id that comes with the login tells them apart. That of a pooler is a
    number of its own, because a cancellation must reach whatever session the client has
    at that time.
    """

    timed_out = False  # in this use
    _silence = UNSERVED  # what it means that there is no answer
    _settings = ''  # with which a transaction begins; none in a session of its own
    _trace = EMIT_MESSAGE  # what a probe commits
    _deadline = math.inf
    _warning: str | None = None

    def start_use(self) -> None:
        """Set a new deadline, and forget what happened in an earlier use."""
        self._deadline = time.monotonic() + ANSWER_WITHIN
        self.timed_out = False
        self._warning = None

    def wait(
        self,
        gen: Generator[Any, Any, Result],
        interval: float = 0.1,
        timeout: float | None = None,
    ) -> Result:
        # One deadline for all waits of a use.
        left = max(0.001, self._deadline - time.monotonic())
        try:
            return super().wait(gen, interval, timeout or min(ANSWER_WITHIN, left))
        except errors._WaitTimeout:
            if self.timed_out:
                raise
        # The answer to a cancellation says what the statement has waited for. Without
        # a cancellation the session would go on waiting, for no client.
        self.timed_out = True
        self._deadline = time.monotonic() + CANCEL_WITHIN
        self.cancel_safe(timeout=CANCEL_WITHIN)
        try:
            return self.wait(gen, interval)
        except errors._WaitTimeout as ex:
            raise psycopg.OperationalError(self._silence) from ex

    def is_idle(self) -> bool:
        """Whether another statement may follow; false for a broken connection."""
        return self.info.transaction_status == TransactionStatus.IDLE

    def configure(self, *, to_read: bool) -> None:
        """Prepare for statements that add plants or read them all."""
        self.add_notice_handler(self._note)
        wanted = SETTINGS | READER_SETTINGS if to_read else SETTINGS
        settings = [list(wanted), list(wanted.values())]
        self._deadline = time.monotonic() + CONNECT_WITHIN
        found = self.execute(SET_IN_SESSION, [*settings, self.info.backend_pid])
        self._deadline = math.inf
        if found.rowcount:
            self._silence = 'no answer'
            self.prepare_threshold = 5  # as psycopg has it
            return
        # A pooler in statement mode refuses a transaction.
        self.execute('BEGIN')
        self.execute('COMMIT')
        cursor = psycopg.ClientCursor(self)
        self._settings = cursor.mogrify(SET_IN_TRANSACTION, settings)

    def transact(self, statements: str, *values: str) -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them."""
        cursor = psycopg.ClientCursor(self)
        # NOTE: as one message of the simple protocol. A pipeline costs twice the CPU.
        cursor.execute(self._settings + statements, values)
        found = [result.fetchall() for result in cursor.results() if result.description]
        self._check_safe()
        return [row for rows in found[bool(self._settings) :] for row in rows]

    def check_table(self, *, may_create: bool) -> None:
        """Check that plants can be added; make the table if it is missing."""
        try:
            self.transact(PROBE)
        except errors.UndefinedTable:
            if not may_create:
                raise
            # Another process may have entered this name into the catalogue just now.
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
        """Yield all plants."""
        if not self._settings:
            cursor = self.cursor(row_factory=args_row(Plant))
            # NOTE: yield from, so that a reader that stops early closes the stream
            # first: it has a lock that closing the connection needs.
            yield from cursor.stream(READ, size=READ_AT_ONCE)
            return
        # A slow reader must not keep a session of the pool for itself. A stream takes a
        # fifth of the time.
        first = ID_MIN
        while first <= ID_MAX and (rows := self.transact(READ_FROM, str(first))):
            yield from (Plant(*row) for row in rows)
            first = rows[-1][0] + 1

    def insert_plants(self, plants: Sequence[Plant]) -> list[int]:
        """Insert plants whose id is free, and commit; return their ids."""
        ids, names, tags = zip(*plants, strict=True)
        # NOTE: psycopg's own arrays take twice the time, and JSON a seventh more.
        numbers = '{' + ','.join(map(str, ids)) + '}'
        arrays = [numbers, texts_array(names), texts_array(tags)]
        if self._settings:
            rows = self.transact(INSERT_LITERALS, *arrays)
        else:
            rows = psycopg.RawCursor(self).execute(INSERT, arrays).fetchall()
            self._check_safe()
        return [id for (id,) in rows]

    def lock_plants(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with the ids of plants, once they are safe.

        The first commit of a plant may be visible but not safe: its session was cut off
        while it waited for a synchronous standby. Reading would not wait for that. A
        lock is a write, so its commit does.

        Raises:
            SerializationFailure: One of them was deleted meanwhile, or is not visible.
        """
        ids = [str(plant.id) for plant in plants]
        rows = self.transact('; '.join([LOCK] * len(ids)), *ids)
        if len(rows) < len(plants):
            raise errors.SerializationFailure('the conflicting row is not visible')
        return {row[0]: Plant(*row) for row in rows}

    def _check_safe(self) -> None:
        # A commit that is cancelled while it waits for a standby is reported as done,
        # with a warning.
        if self._warning:
            raise errors.StatementCompletionUnknown(f'{NOT_CONFIRMED}: {self._warning}')

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        # Its SQLSTATE is that of any RAISE WARNING in a trigger, and its text may be
        # translated. Only the part of the server that raises it tells it apart.
        if diagnostic.source_file == 'syncrep.c':
            self._warning = diagnostic.message_primary


def texts_array(texts: Iterable[str | None]) -> str:
    """Return the literal of an SQL array of texts."""
    escaped = [t and t.replace('\\', '\\\\').replace('"', '\\"') for t in texts]
    return '{' + ','.join(['NULL' if t is None else f'"{t}"' for t in escaped]) + '}'
