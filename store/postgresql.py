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
  server that hangs keeps none. While nothing answers, one caller at a time tries, and
  the others fail at once.
"""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import closing
from contextlib import contextmanager
from contextlib import suppress
from typing import Any
from typing import TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import args_row

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
from store.scheduler import THREADS
from store.scheduler import Scheduler
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
CANCEL_WITHIN = 1
# After nothing answered, for this long nobody tries.
AWAY = 0.1
# A batch each, and one for the probe.
MOST_CONNECTIONS = SLOW_SYNCS_IN_FLIGHT + 1
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
# unique id, the rights to insert and to lock, and a server that can be written to.
PROBE = (
    'INSERT INTO plants (id, name, tag) SELECT id, name, tag FROM plants WHERE false '
    'FOR UPDATE ON CONFLICT (id) DO NOTHING'
)
# One row each, since a distributed engine can lock no more with one statement.
LOCK = 'SELECT id, name, tag FROM plants WHERE id = %s FOR UPDATE'
# An operator who asks for less than a commit that is on the disk cannot mean this
# service; who asks for more (remote_apply, for example) does. Nor for silence about a
# commit that is not safe.
SETTINGS = (
    "SELECT set_config('statement_timeout', $1, false), "
    "set_config('client_min_messages', 'warning', false), "
    "CASE WHEN current_setting('synchronous_commit', true) = 'off' "
    "THEN set_config('synchronous_commit', 'on', false) END"
)

RETRIED = (errors.SerializationFailure, errors.DeadlockDetected)
# What a table says that has rules of its own; the other plants of a batch may keep to
# them. The last two are an index that is too small for a text, and a trigger.
RULES = (
    errors.DataError,
    errors.IntegrityError,
    errors.WithCheckOptionViolation,
    errors.ProgramLimitExceeded,
    errors.RaiseException,
)

RULE = 'a rule of the table plants does not permit it'
# What a client may be told, by SQLSTATE or its class; its words are for the log.
REASONS = {
    None: 'there is no connection to the database',
    '22': RULE,
    '23': RULE,
    '25': 'the database is read-only',
    '40': 'the database is busy with other changes of the same plants',
    '40003': 'the database does not say whether the plant is safe',
    '42': 'the database does not permit it',
    '42P01': 'there is no table plants',
    '44': RULE,
    '53': 'the database is out of room',
    '54': RULE,
    '57': 'the database is going down or coming up',
    '57014': 'the database did not answer in time',
    'P0': RULE,
}


def check_url(url: str) -> None:
    """Check that a URL can be used.

    Raises:
        ValueError: It cannot; the message does not repeat the URL.
    """
    # Where a password has one of these, libpq takes the rest of it for something else,
    # and reports that. So a later @, of a parameter, has to be told from that.
    if re.search('@.*@|[/?#].*@', url.partition('://')[2], re.DOTALL):
        raise ValueError(
            'in this URL write @ as %40, except before the host, and in a user or '
            'password / as %2F, ? as %3F, # as %23'
        )
    try:
        ports = conninfo_to_dict(url).get('port', '')
    except psycopg.ProgrammingError:
        raise ValueError('it is not a URL that libpq accepts') from None
    if not re.fullmatch('[0-9,]*', str(ports)):
        raise ValueError('the port is not a number')


class PostgreSQLStore(LazyStore['_Database']):
    """Keep plants in the table ``plants``; durable when a commit is.

    Args:
        url: ``postgresql://...``, as libpq reads it. Several hosts are tried in turn,
            and only one that can be written to is used.
        create: With ``never``, a table that is missing is not made.
    """

    def __init__(
        self,
        url: str,
        *,
        create: Create = 'first',
        scheduler: Scheduler = THREADS,
    ) -> None:
        super().__init__(scheduler=scheduler)
        check_url(url)
        self._url = url
        self._create = create

    def add(self, plant: Plant) -> bool:
        return self._backend().add(plant)

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        return self._backend().add_many(plants)

    def __iter__(self) -> Iterator[Plant]:
        return self._backend().plants()

    def size_hint(self) -> int:
        return self._backend().count()

    def check_opening(self) -> None:
        try:
            self.ping()
        except StoreUnavailable as ex:
            if not isinstance(ex.__cause__, errors.UndefinedTable):  # it can be made
                raise

    def _open_backend(self) -> _Database:
        return _Database(self._url, self._create, self._scheduler, self._report_sync)


class _Connection(psycopg.Connection[Any]):
    """A connection that does not wait for ever, and notes when it is warned."""

    warning: str | None = None  # that came since the last commit was checked
    deadline = math.inf  # of whoever uses it now

    def wait(
        self,
        gen: Generator[Any, Any, Result],
        interval: float = 0.1,
        timeout: float | None = None,
    ) -> Result:
        # One for all waits of a user: the end of a pipeline that broke waits again.
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise psycopg.OperationalError('there is no time left')
        return super().wait(gen, interval, timeout or min(ANSWER_WITHIN, left))

    def is_idle(self) -> bool:
        """Whether another statement may follow; not after it broke."""
        return self.info.transaction_status == TransactionStatus.IDLE

    def hangs(self) -> bool:
        """Whether the server still owes an answer."""
        return self.info.transaction_status == TransactionStatus.ACTIVE

    def prepare_for_plants(self) -> None:
        """Make the settings of its session."""
        self.add_notice_handler(self._note)
        milliseconds = f'{1000 * STATEMENT_WITHIN:.0f}'
        psycopg.RawCursor(self).execute(SETTINGS, [milliseconds])

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


class _Pool:
    """Connections that stay open, each lent to one caller at a time.

    Not psycopg_pool's: that connects in a thread of its own, which keeps to itself why
    it cannot, and a caller waits out its time meanwhile.

    Args:
        connect: Makes a connection; called in the thread that needs it.
    """

    def __init__(self, connect: Callable[[], _Connection]) -> None:
        self._connect = connect
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[_Connection] = []
        self._in_use = 0  # or being made
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[_Connection]:
        """Lend a connection.

        Raises:
            TimeoutError: All are in use, and stay it.
            StoreClosed: ``close`` was called.
            Exception: Whatever ``connect`` raised.
        """
        connection = self._take()
        connection.deadline = time.monotonic() + ANSWER_WITHIN
        try:
            yield connection
        finally:
            self._give_back(connection)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._close_idle()
            self._changed.notify_all()

    def _take(self) -> _Connection:
        with self._changed:
            if not self._changed.wait_for(self._has_one, CONNECT_WITHIN):
                raise TimeoutError
            if self._closed:
                raise StoreClosed
            self._in_use += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._changed.notify_all()
                # The server may allow no more: then one of those in use will do.
                self._changed.wait_for(
                    lambda: self._idle or not self._in_use, CONNECT_WITHIN
                )
                if not self._idle:
                    raise
                self._in_use += 1
                return self._idle.pop()

    def _has_one(self) -> bool:
        """Whether a caller need not wait. REQUIRES: lock held."""
        return self._closed or bool(self._idle) or self._in_use < MOST_CONNECTIONS

    def _give_back(self, connection: _Connection) -> None:
        with self._changed:
            self._in_use -= 1
            self._idle.append(connection)
            if self._closed or not connection.is_idle():
                self._close_idle()  # all of them: they are to the same server
            self._changed.notify_all()

    def _close_idle(self) -> None:
        """Close what nobody uses. REQUIRES: lock held."""
        while self._idle:
            self._idle.pop().close()


class _Database:
    """A database that is in use by this process."""

    def __init__(
        self,
        url: str,
        create: Create,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
    ) -> None:
        self._shown = masked(url)
        self._create = create
        self._parameters: dict[str, Any] = {
            'connect_timeout': CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
        }
        self._commit = GroupCommit[Plant, Batch](
            lambda batch: batch, self._insert, scheduler=scheduler, observe=observe
        )
        self._pool = _Pool(self._connect)
        self._checked = False
        self._lock = threading.Lock()  # guards what follows
        self._away_until = 0.0  # or 0 while the database answers
        self._trouble = ''  # why it does not

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
        """Yield all plants, over a connection of its own; a standby will do."""
        with self._reader() as connection:
            # The whole takes as long as the reader likes.
            connection.execute("SELECT set_config('statement_timeout', '0', false)")
            rows = connection.cursor(row_factory=args_row(Plant)).stream(
                'SELECT id, name, tag FROM plants', size=1000
            )
            try:
                # NOTE: handed on with yield from, so that who stops to read closes
                # the stream first: it has a lock that the end of the connection needs.
                yield from rows
            except errors.UndefinedTable:
                if self._create == 'never':
                    raise

    def count(self) -> int:
        """Return how many plants there are, or 0 if it takes too long to count them."""
        with suppress(StoreUnavailable), self._reader() as connection:
            connection.prepare_for_plants()
            ((number,),) = connection.execute('SELECT count(*) FROM plants')
            return int(number)
        return 0

    @contextmanager
    def _reader(self) -> Iterator[_Connection]:
        """Connect to a server that need not take plants."""
        parameters = self._parameters | {'target_session_attrs': 'any'}
        # NOTE: not the block of the connection itself, which ends its transaction: it
        # would wait for a stream that was left half-way, and that for it.
        with (
            self._errors(),
            closing(_Connection.connect(**parameters)) as connection,
        ):
            self._check_encoding(connection)
            yield connection

    def ping(self) -> None:
        with self._connection() as connection:
            connection.execute(PROBE)

    def close(self) -> None:
        self._pool.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Keep what belongs to the parent: letting go of it would end in complaints."""
        _abandoned.append(self)

    def _connect(self) -> _Connection:
        connection = _Connection.connect(**self._parameters)
        try:
            connection.prepare_for_plants()
            if not self._checked:
                self._check(connection)
                self._checked = True
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: _Connection) -> None:
        """See that the database fits; make the table if that is asked for.

        Where it is there, the right to make it is not needed. Two who make it at once
        may both fail: a name that the one enters into the catalogue is in the other's
        way. Then it is there.
        """
        self._check_encoding(connection)
        try:
            connection.execute(PROBE)
        except errors.UndefinedTable:
            if self._create == 'never':
                raise
            with suppress(
                errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
            ):
                connection.execute(CREATE_TABLE)
            connection.execute(PROBE)

    def _check_encoding(self, connection: _Connection) -> None:
        encoding = connection.info.parameter_status('server_encoding')
        if encoding != 'UTF8':
            raise self._unavailable(f'the database is encoded in {encoding}')

    def _insert(self, batch: Batch) -> None:
        """Insert the new plants of a batch, and compare the others."""
        first: dict[int, Plant] = {}
        for entry in batch:
            first.setdefault(entry.item.id, entry.item)
        # In one order everywhere, so that two batches never wait for each other.
        plants = [first[id] for id in sorted(first)]
        new: set[int] = set()
        stored: dict[int, Plant] = {}
        try:
            self._insert_rows(plants, new, stored)
        except RULES as ex:
            if len(batch) == 1:
                raise self._refused(ex) from ex
            for entry in batch:
                self._insert_alone(entry)
            return
        for entry in batch:
            id = entry.item.id
            entry.new = id in new
            new.discard(id)  # the same plant later in this batch is not
            known = stored.get(id, first[id])
            entry.error = None if entry.item == known else IdTaken(id)

    def _insert_alone(self, entry: Entry[Plant]) -> None:
        try:
            self._insert([entry])
        except StoreUnavailable as ex:
            entry.error = ex

    def _insert_rows(
        self, plants: Sequence[Plant], new: set[int], stored: dict[int, Plant]
    ) -> None:
        """Insert what is new; find what is stored in the place of the others."""
        failure: psycopg.Error = errors.SerializationFailure(
            'what is in the way of a plant is not to be seen'
        )
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_chance.uniform(0, 0.001 * 2**attempt))
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
        """Lend a connection of the pool, unless nothing answers at the moment.

        Raises:
            StoreUnavailable: There is none, or it broke; other errors pass through.
        """
        with self._lock:
            now = time.monotonic()
            if now < self._away_until:
                raise self._unavailable(self._trouble)
            was_away = self._away_until > 0
            if was_away:
                # This caller tries; the others need not wait for what it meets.
                self._away_until = math.inf
        away, trouble = True, REASONS[None]
        try:
            with self._errors(), self._pool.lend() as connection:
                away = False
                try:
                    yield connection
                except psycopg.Error as ex:
                    away = connection.hangs()
                    if away:
                        # Or a session that waits for a standby would go on with that
                        # when nobody listens, and be one of many soon.
                        with suppress(psycopg.Error):
                            connection.cancel_safe(timeout=CANCEL_WITHIN)
                    if isinstance(ex, errors.ReadOnlySqlTransaction):
                        # A standby now; another host may be the primary.
                        connection.close()
                    raise
        except StoreUnavailable as ex:
            trouble = ex.reason
            if isinstance(ex.__cause__, TimeoutError):
                away = was_away  # it was not asked
            raise
        finally:
            with self._lock:
                self._away_until = time.monotonic() + AWAY if away else 0.0
                self._trouble = trouble

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what went wrong in the words of a store."""
        try:
            yield
        except TimeoutError as ex:
            reason = 'all connections to the database are in use'
            raise self._unavailable(reason) from ex
        except (*RETRIED, *RULES):
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


# Of our own: a program that seeds the common one means something else.
_chance = random.Random()

# Whose connections a child of a fork has from its parent.
_abandoned: list[_Database] = []
