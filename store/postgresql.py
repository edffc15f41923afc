"""The store for those who outgrow one machine: a PostgreSQL database.

Any number of servers on any number of machines share it. It keeps to SQL that engines
which speak PostgreSQL's protocol and scale out understand too: no advisory lock, no
sequence, no lock of a table. What makes it safe:

* Plants that wait together are one *batch*: one ``INSERT`` of several rows, one commit
  (``store/group_commit.py``). Rows whose id is there already are left out by the
  ``INSERT``, and only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed. A repeat is
  an acknowledgement too, and the first commit of its plant may be visible but not safe:
  its session was cut off while it waited for a synchronous standby. Reading would not
  wait. So the comparison locks the row, which is a write, and commits: that waits.
* A commit that somebody cancels while it waits for a standby is reported as done, with
  a warning. So a batch that comes with a warning is not acknowledged.
* Nobody waits for ever. Each answer has a deadline, at the server and here, since a
  server that hangs keeps none. While no connection is to be had, adds fail at once.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress
from typing import Any
from typing import TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import args_row
from psycopg_pool import ConnectionPool
from psycopg_pool import PoolClosed
from psycopg_pool import PoolTimeout

from store.base import Create
from store.base import Plant
from store.errors import IdTaken
from store.errors import StoreClosed
from store.errors import StoreUnavailable
from store.group_commit import SLOW_SYNCS_IN_FLIGHT
from store.group_commit import Entry
from store.group_commit import GroupCommit
from store.group_commit import outcomes
from store.lazy import LazyStore
from store.url import masked

# What psycopg has to say of a connection that was lost, the store says itself.
logging.getLogger('psycopg').addHandler(logging.NullHandler())

Result = TypeVar('Result')
Batch = Sequence[Entry[Plant]]

# All in seconds. How long a connection may take to be made, and to be free.
CONNECT_WITHIN = 2
# The server's own limit for a statement is the shorter one: it can say what happened.
STATEMENT_WITHIN = 4
ANSWER_WITHIN = 5
# After nobody could connect, for this long nobody tries.
AWAY = 0.5
# How often a batch is tried again that the server could not serialize. The last pause
# is up to half a second.
ATTEMPTS = 10
# The protocol numbers the parameters of a statement with 16 bits; there are 3 a plant.
MOST_ROWS = 10_000

CREATE_TABLE = (
    'CREATE TABLE IF NOT EXISTS plants '
    '(id bigint PRIMARY KEY, name text NOT NULL, tag text)'
)
# Does nothing, but only where an add would work: with a table of such columns and a
# unique id, the right to insert, and a server that can be written to.
PROBE = (
    'INSERT INTO plants (id, name, tag) SELECT id, name, tag FROM plants WHERE false '
    'ON CONFLICT (id) DO NOTHING'
)
# One row each, since a distributed engine can lock no more with one statement.
LOCK = 'SELECT id, name, tag FROM plants WHERE id = %s FOR UPDATE'
# An operator who asks for less than a commit that is on the disk cannot mean this
# service; who asks for more (remote_apply, for example) does.
SETTINGS = (
    f"SELECT set_config('statement_timeout', '{1000 * STATEMENT_WITHIN}', false), "
    "CASE WHEN current_setting('synchronous_commit', true) = 'off' "
    "THEN set_config('synchronous_commit', 'on', false) END"
)

RETRIED = (errors.SerializationFailure, errors.DeadlockDetected)

# What a client may be told, by SQLSTATE or its class; its words are for the log.
REASONS = {
    None: 'there is no connection to the database',
    '22': 'a rule of the table plants does not permit it',
    '23': 'a rule of the table plants does not permit it',
    '25': 'the database is read-only',
    '40': 'the database is busy with other changes of the same plants',
    '40003': 'the database does not say whether the plant is safe',
    '42': 'the database does not permit it',
    '42P01': 'there is no table plants',
    '53': 'the database is out of room',
    '57': 'the database is going down or coming up',
    '57014': 'the database did not answer in time',
}


def check_url(url: str) -> None:
    """Check that a URL can be used.

    Raises:
        ValueError: It cannot; the message does not repeat the URL.
    """
    # Where a password has one of these, libpq takes the rest of it for something else,
    # and reports that.
    if re.search('@.*@|[/?#].*@', url.partition('://')[2]):
        raise ValueError('in a user or password, write @ as %40, / as %2F, ? as %3F')
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise ValueError('it is not a URL that libpq accepts') from None


class PostgreSQLStore(LazyStore['_Database']):
    """Keep plants in the table ``plants``; durable when a commit is.

    Args:
        url: ``postgresql://...``, as libpq reads it. Several hosts are tried in turn,
            and only one that can be written to is used.
        create: With ``never``, a table that is missing is not made.
    """

    def __init__(self, url: str, *, create: Create = 'first') -> None:
        super().__init__()
        check_url(url)
        self._url = url
        self._create = create

    def add(self, plant: Plant) -> bool:
        return self._opened().add(plant)

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        return self._opened().add_many(plants)

    def __iter__(self) -> Iterator[Plant]:
        return self._opened().plants()

    def __length_hint__(self) -> int:
        # To count many takes longer than any answer may.
        with suppress(StoreUnavailable):
            return self._opened().count()
        return 0

    def check_opening(self) -> None:
        try:
            self.ping()
        except StoreUnavailable as ex:
            if not isinstance(ex.__cause__, errors.UndefinedTable):  # it can be made
                raise

    def _open(self) -> _Database:
        return _Database(self._url, self._create, self.observe)


class _Connection(psycopg.Connection[Any]):
    """A connection that does not wait for ever, and notes when it is warned."""

    warning: str | None = None  # that came since the last commit was checked

    def wait(
        self,
        gen: Generator[Any, Any, Result],
        interval: float = 0.1,
        timeout: float | None = None,
    ) -> Result:
        return super().wait(gen, interval, timeout or ANSWER_WITHIN)

    def prepare_for_plants(self) -> None:
        """Make the settings of its session."""
        self.add_notice_handler(self._note)
        psycopg.RawCursor(self).execute(SETTINGS)

    def insert_plants(self, plants: Sequence[Plant]) -> set[int]:
        """Insert plants whose id is free; return their ids."""
        numbers = range(1, 3 * len(plants), 3)
        rows = ', '.join(f'(${n}, ${n + 1}, ${n + 2})' for n in numbers)
        # NOTE: a raw cursor, and as many shapes of this statement as there are sizes of
        # a batch: both sides parse each once. An array or JSON would do with one shape,
        # and costs more for it at either side.
        cursor = psycopg.RawCursor(self).execute(
            f'INSERT INTO plants (id, name, tag) VALUES {rows} '
            f'ON CONFLICT (id) DO NOTHING RETURNING id',
            [value for plant in plants for value in plant],
        )
        self._check_safe()
        return {id for (id,) in cursor.fetchall()}

    def lock_plants(self, ids: Sequence[int]) -> dict[int, Plant]:
        """Return the plants that have these ids; wait until they are safe."""
        cursor = self.cursor()
        # In one transaction: a pipeline without BEGIN commits where it ends.
        cursor.executemany(LOCK, [(id,) for id in ids], returning=True)
        self._check_safe()
        return {row[0]: Plant(*row) for found in cursor.results() for row in found}

    def _check_safe(self) -> None:
        warning, self.warning = self.warning, None
        if warning:
            raise errors.StatementCompletionUnknown(warning)

    def _note(self, diagnostic: errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == 'WARNING':
            self.warning = diagnostic.message_primary


class _Database:
    """A database that is in use by this process."""

    def __init__(
        self, url: str, create: Create, observe: Callable[[int, float], None] | None
    ) -> None:
        self._shown = masked(url)
        self._away_until = 0.0
        self._parameters: dict[str, Any] = {
            'connect_timeout': CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
        }
        # Here and not by the pool, which keeps to itself why it cannot connect.
        with self._errors(), self._connect() as connection:
            encoding = connection.info.parameter_status('server_encoding')
            if encoding != 'UTF8':
                raise self._unavailable(f'the database is encoded in {encoding}')
            self._find_table(connection, create)
        self._commit = GroupCommit[Plant, Batch](
            lambda batch: batch, self._insert, observe=observe
        )
        self._pool = ConnectionPool(
            connection_class=_Connection,
            kwargs=self._parameters,
            configure=_Connection.prepare_for_plants,
            min_size=1,
            # A batch each, and one for the probe.
            max_size=SLOW_SYNCS_IN_FLIGHT + 1,
            timeout=CONNECT_WITHIN,
            # Who needs a connection next makes the pool try again.
            reconnect_timeout=0,
            num_workers=1,
            open=True,
        )

    def add(self, plant: Plant) -> bool:
        return self._commit.submit(plant, len(plant.name) + len(plant.tag or ''))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        batch = [Entry(plant, 0) for plant in plants]
        for start in range(0, len(batch), MOST_ROWS):
            self._insert(batch[start : start + MOST_ROWS])
        for entry in batch:
            if isinstance(entry.error, StoreUnavailable):
                raise entry.error
        return outcomes(batch)

    def plants(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own."""
        with self._errors(), self._connect() as connection:
            # The whole takes as long as the reader likes.
            connection.execute("SELECT set_config('statement_timeout', '0', false)")
            # NOTE: handed on with yield from, so that who stops to read closes the
            # stream first: it holds a lock that the end of the connection waits for.
            yield from connection.cursor(row_factory=args_row(Plant)).stream(
                'SELECT id, name, tag FROM plants', size=1000
            )

    def count(self) -> int:
        with self._connection() as connection:
            row = connection.execute('SELECT count(*) FROM plants').fetchone()
            return int(row[0]) if row else 0

    def ping(self) -> None:
        with self._connection() as connection:
            connection.execute(PROBE)

    def close(self) -> None:
        self._pool.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Keep what belongs to the parent from ending, which would be said to it."""
        _abandoned.append(self)

    def _connect(self) -> _Connection:
        connection = _Connection.connect(**self._parameters)
        connection.prepare_for_plants()
        return connection

    def _find_table(self, connection: _Connection, create: Create) -> None:
        """See that the table is there; where it is, the right to make it is not needed.

        Two who make it at once may both fail: a name that the one enters into the
        catalogue is in the other's way. Then it is there.
        """
        try:
            connection.execute(PROBE)
        except errors.UndefinedTable:
            if create == 'never':
                raise
            with suppress(errors.UniqueViolation, errors.DuplicateTable):
                connection.execute(CREATE_TABLE)
            connection.execute(PROBE)

    def _insert(self, batch: Batch) -> None:
        """Insert the new plants of a batch, and compare the others."""
        first: dict[int, Plant] = {}
        for entry in batch:
            first.setdefault(entry.record.id, entry.record)
        # In one order everywhere, so that two batches never wait for each other.
        plants = [first[id] for id in sorted(first)]
        new: set[int] = set()
        stored: dict[int, Plant] = {}
        try:
            self._insert_rows(plants, new, stored)
        except (errors.DataError, errors.IntegrityError) as ex:
            # The table has rules of its own, and a plant of the batch breaks one.
            if len(batch) == 1:
                raise self._refused(ex) from ex
            for entry in batch:
                self._insert_alone(entry)
            return
        for entry in batch:
            id = entry.record.id
            entry.new = id in new
            new.discard(id)  # the same plant later in this batch is not
            known = stored.get(id, first[id])
            entry.error = None if entry.record == known else IdTaken(id)

    def _insert_alone(self, entry: Entry[Plant]) -> None:
        try:
            self._insert([entry])
        except StoreUnavailable as ex:
            entry.error = ex

    def _insert_rows(
        self, plants: Sequence[Plant], new: set[int], stored: dict[int, Plant]
    ) -> None:
        """Insert what is new; find what is stored in the place of the others."""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(random.uniform(0, 0.001 * 2**attempt))
            try:
                with self._connection() as connection:
                    new |= connection.insert_plants(plants)
                    plants = [plant for plant in plants if plant.id not in new]
                    if plants:
                        stored |= connection.lock_plants([plant.id for plant in plants])
                        # One that was deleted in between is new after all.
                        plants = [plant for plant in plants if plant.id not in stored]
                    if not plants:
                        return
            except RETRIED as ex:
                failure = ex
        raise self._refused(failure) from failure

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """Lend a connection of the pool.

        Raises:
            StoreUnavailable: There is none, or it broke; other errors pass through.
        """
        if time.monotonic() < self._away_until:
            raise self._unavailable(REASONS[None])
        with self._errors():
            try:
                connection = self._pool.getconn()
            except PoolTimeout:
                self._away_until = time.monotonic() + AWAY
                raise
            try:
                yield connection
            except psycopg.Error as ex:
                if ex.sqlstate is None or isinstance(ex, errors.ReadOnlySqlTransaction):
                    self._discard(connection)
                raise
            finally:
                self._pool.putconn(connection)

    def _discard(self, connection: _Connection) -> None:
        """Close a connection, and those that idle: they are to the same server."""
        if connection.info.transaction_status == TransactionStatus.ACTIVE:
            # The server hangs, or waits for a standby. A session that goes on with
            # that when nobody listens would be one of many soon.
            self._away_until = time.monotonic() + AWAY
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=1)
        connection.close()
        self._pool.drain()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what went wrong in the words of a store."""
        try:
            yield
        except PoolClosed as ex:
            raise StoreClosed from ex
        except (*RETRIED, errors.DataError, errors.IntegrityError):
            raise
        except psycopg.Error as ex:
            raise self._refused(ex) from ex

    def _refused(self, error: psycopg.Error) -> StoreUnavailable:
        code = error.sqlstate
        reason = REASONS.get(code) or REASONS.get(code and code[:2])
        return self._unavailable(
            reason or f'the database refuses it ({code})', ' '.join(str(error).split())
        )

    def _unavailable(self, reason: str, detail: str = '') -> StoreUnavailable:
        return StoreUnavailable(reason, store=self._shown, detail=detail)


# What a child of a fork must not touch: the finalizers would talk to the server.
_abandoned: list[_Database] = []
