"""A connection to a PostgreSQL server: the statements, and the meaning of errors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from store.base import Plant
from store.errors import StoreUnavailable

# The store reports a lost connection itself; psycopg's own warning would repeat it.
logging.getLogger('psycopg').addHandler(logging.NullHandler())

Result = TypeVar('Result')

# Time limits in seconds. For one statement: the limit of the server, and ours. The
# server's is shorter, because its error says what happened.
STATEMENT_WITHIN = 4
ANSWER_WITHIN = 5
CANCEL_WITHIN = 1
# For a lock that another session holds: other plants wait in the same batch.
LOCK_WITHIN = 0.3

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
READ = 'SELECT id::bigint, name::text, tag::text FROM plants'
# One row each, since a distributed engine can lock no more with one statement.
LOCK = f'{READ} WHERE id = %s FOR UPDATE'
# A setting that the server does not have is NULL, and is left out. remote_apply is the
# one value that is kept: no other commit is safer than "on".
SET = (
    'SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) '
    "AS wanted (name, value) WHERE current_setting(name, true) <> 'remote_apply'"
)
# What must hold in a session, whatever its role or its database has as a default.
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
NOT_OF_ONE_PLANT = ('08', '25', '40003', '53', '57', '58')

# By SQLSTATE or its class. A client sees these words; the log also has the server's.
REASONS: dict[str | None, str] = {
    **dict.fromkeys(
        ('22', '23', '44', '54', 'P0'), 'a rule of the table plants does not permit it'
    ),
    None: 'there is no connection to the database',
    '25006': 'the database is read-only',
    '40': 'the database is busy with other changes of the same plants',
    '40003': 'the database does not say whether the plant is safe',
    '42': 'the database does not permit it',
    '42P01': 'there is no table plants',
    '53': 'the database is out of room',
    '55P03': 'another session has locked the plant',
    '57': 'the database is shutting down or starting up',
    '57014': 'the database did not answer in time',
}


@contextmanager
def explained(store: str) -> Iterator[None]:
    """Turn errors of psycopg into ``StoreUnavailable`` of the store of this name."""
    try:
        yield
    except psycopg.Error as ex:
        code = ex.sqlstate
        if code is None and 'session is read-only' in str(ex):  # in the words of libpq
            code = errors.ReadOnlySqlTransaction.sqlstate
        reason = REASONS.get(code) or REASONS.get(code and code[:2])
        raise StoreUnavailable(
            reason or f'the database refuses it ({code})',
            store=store,
            detail=' '.join(str(ex).split()),
        ) from ex


class Connection(psycopg.Connection[Any]):
    """A connection that waits no longer than its deadline, and remembers a warning."""

    _deadline = math.inf
    _warning: str | None = None

    def start_use(self) -> None:
        """Set a new deadline, and forget the warning of an earlier use."""
        self._deadline = time.monotonic() + ANSWER_WITHIN
        self._warning = None

    def wait(
        self,
        gen: Generator[Any, Any, Result],
        interval: float = 0.1,
        timeout: float | None = None,
    ) -> Result:
        # One deadline for all waits of a use: a broken pipeline waits again at its end.
        left = max(0.001, self._deadline - time.monotonic())
        return super().wait(gen, interval, timeout or min(ANSWER_WITHIN, left))

    def is_idle(self) -> bool:
        """Whether another statement may follow; false for a broken connection."""
        return self.info.transaction_status == TransactionStatus.IDLE

    def hangs(self) -> bool:
        """Whether the server still owes an answer at the deadline, or just before."""
        is_active = self.info.transaction_status == TransactionStatus.ACTIVE
        return is_active and time.monotonic() > self._deadline - 0.1

    def close(self) -> None:
        """Close the connection; cancel its statement if the server hangs."""
        # Otherwise a session that waits for a standby would go on waiting for no
        # client, and soon there would be many of them.
        if self.hangs():
            with suppress(psycopg.Error):
                self.cancel_safe(timeout=CANCEL_WITHIN)
        super().close()

    def configure(self, *, to_read: bool) -> None:
        """Set what must hold in the session, which adds plants or reads them all."""
        self.add_notice_handler(self._note)
        settings = SETTINGS | READER_SETTINGS if to_read else SETTINGS
        self.execute(SET, [list(settings), list(settings.values())])

    def insert_plants(self, plants: Sequence[Plant]) -> list[int]:
        """Insert plants whose id is free, and commit; return their ids."""
        ids, names, tags = zip(*plants, strict=True)
        cursor = psycopg.RawCursor(self).execute(
            INSERT,
            # NOTE: psycopg's own arrays take twice the time, and JSON a seventh more.
            [f'{{{",".join(map(str, ids))}}}', texts_array(names), texts_array(tags)],
        )
        self._check_safe()
        return [id for (id,) in cursor.fetchall()]

    def lock_plants(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with the ids of plants, once they are safe.

        The first commit of a plant may be visible but not safe: its session was cut off
        while it waited for a synchronous standby. Reading would not wait for that. A
        lock is a write, so its commit does.

        Raises:
            SerializationFailure: One of them was deleted meanwhile, or is not visible.
        """
        cursor = self.cursor()
        # In one transaction: a pipeline without BEGIN commits where it ends.
        cursor.executemany(LOCK, [(str(plant.id),) for plant in plants], returning=True)
        self._check_safe()
        stored = {row[0]: Plant(*row) for found in cursor.results() for row in found}
        if len(stored) < len(plants):
            raise errors.SerializationFailure('the conflicting row is not visible')
        return stored

    def _check_safe(self) -> None:
        # A commit that is cancelled while it waits for a standby is reported as done,
        # with a warning.
        if self._warning:
            raise errors.StatementCompletionUnknown(self._warning)

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        # Its SQLSTATE is that of any RAISE WARNING in a trigger, and its text may be
        # translated. Only the part of the server that raises it tells it apart.
        if diagnostic.source_file == 'syncrep.c':
            self._warning = diagnostic.message_primary


def texts_array(texts: Iterable[str | None]) -> str:
    """Return the literal of an SQL array of texts."""
    escaped = [t and t.replace('\\', '\\\\').replace('"', '\\"') for t in texts]
    return '{' + ','.join(['NULL' if t is None else f'"{t}"' for t in escaped]) + '}'
