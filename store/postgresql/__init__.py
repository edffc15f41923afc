"""The store for those who outgrow one machine: a PostgreSQL database.

Any number of servers on any number of machines share it. It keeps to SQL that engines
which speak PostgreSQL's protocol and scale out understand too: no advisory lock, no
sequence, no lock of a table. What makes it safe:

* Plants that wait together are one *batch*: one ``INSERT`` of several rows, one commit
  (``store/group_commit.py``). The ``INSERT`` leaves out rows whose id is taken, and
  only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if it has one. A repeat is an acknowledgement too: its comparison
  locks the row and commits.
* When a connection is lost the batch is sent once more over a new one. What the first
  connection committed is found then and compared.
* Every wait has a limit at the server, and another one here for a server that hangs.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import args_row

from store.base import Create, Plant
from store.errors import IdTaken, StoreClosed, StoreUnavailable
from store.group_commit import Entry, GroupCommit, outcomes
from store.lazy import LazyStore
from store.masking import masked
from store.postgresql.connection import (
    CREATE_TABLE,
    NOT_OF_ONE_PLANT,
    PROBE,
    READ,
    Connection,
    explained,
)
from store.scheduler import THREADS, Scheduler

Result = TypeVar('Result')
Batch = Sequence[Entry[Plant]]

# Time limits in seconds.
CONNECT_WITHIN = 2
RETRY_AFTER = 0.1  # between two attempts to reach a database that does not answer
LOCKED_FOR = 0.5  # a plant that was found locked is refused at once for so long
ALONE_WITHIN = 1  # for the plants of a refused batch, each alone, until the last begins
# For a batch that the server cannot serialize, with pauses of half a second in all.
ATTEMPTS = 9


class PostgreSQLStore(LazyStore['Database']):
    """Keep plants in the table ``plants``; as durable as a commit of the database.

    Args:
        url: ``postgresql://...``, as libpq reads it. Several hosts are tried in turn,
            and only one that can be written to is used.
        create: With ``never``, a table that is missing is not made.
        scheduler: How the callers wait.

    Raises:
        ValueError: The URL cannot be used; the message does not repeat it.
    """

    def __init__(
        self, url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
    ) -> None:
        super().__init__(scheduler=scheduler)
        # Where a password has one of these characters, libpq takes the rest of it for
        # the host or a parameter, and its error message shows that. An @ in a parameter
        # looks the same.
        pattern = '@.*@|[/?#].*@|%(?![0-9a-f]{2})'
        if re.search(pattern, url.partition('://')[2], re.DOTALL | re.IGNORECASE):
            raise ValueError(
                'percent-encode special characters in the password: % is %25, '
                '@ is %40, / is %2F, ? is %3F, # is %23'
            )
        try:
            ports = conninfo_to_dict(url).get('port', '')
        except psycopg.ProgrammingError:
            raise ValueError('it is not a URL that libpq accepts') from None
        if not re.fullmatch('[0-9,]*', str(ports)):
            raise ValueError('the port is not a number')
        self._url = url
        self._create = create

    def __iter__(self) -> Iterator[Plant]:
        return self._backend().plants()

    def check_opening(self) -> None:
        self._check_open()
        try:
            # A ping of this one may make the table.
            with PostgreSQLStore(
                self._url, create='never', scheduler=self._scheduler
            ) as other:
                other.ping()
        except StoreUnavailable as ex:
            if not isinstance(ex.__cause__, errors.UndefinedTable):  # it can be made
                raise

    def _open_backend(self) -> Database:
        return Database(self._url, self._create, self._scheduler, self._report_sync)


class Database:
    """Adds plants to a database, and reads them.

    Plants that wait together are stored as one batch. If the database refuses a batch,
    each plant is tried by itself. So a plant that breaks a rule is refused alone, and
    one that another session has locked delays the others of its batch by two waits of
    ``LOCK_WITHIN``. To put it into the next batches would delay those too, so its
    repeats are refused at once for ``LOCKED_FOR``.

    Connections stay open, each lent to one caller at a time. During an *outage*, while
    the database does not answer, one caller at a time asks it, ``RETRY_AFTER`` seconds
    after the previous one. All others are refused at once.

    Not psycopg_pool: it connects in a thread of its own, which keeps the reason of a
    failure, while the caller waits for a timeout.
    """

    def __init__(
        self,
        url: str,
        create: Create,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
    ) -> None:
        self._shown = masked(url)
        self._parameters: dict[str, Any] = {
            'connect_timeout': CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
        }
        self._may_create = create != 'never'
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[Connection] = []
        self._lent = 0  # or being made
        self._closed = False
        self._outage: str | None = None  # the reason
        self._next_attempt = 0.0  # in an outage
        # The first stage of group commit hands the batch over to the second, since one
        # statement writes and commits.
        self._batches = GroupCommit[Plant, Batch](
            lambda batch: batch, self._store, scheduler=scheduler, observe=observe
        )
        # Of plants that were found locked: when to try again, and the error until then.
        self._locked: dict[int, tuple[float, StoreUnavailable]] = {}

    def add(self, plant: Plant) -> bool:
        return self._batches.submit(plant, len(plant.name) + len(plant.tag or ''))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        entries = [Entry(plant, 0) for plant in plants]
        self._store(entries)
        for entry in entries:
            if isinstance(entry.error, StoreUnavailable):
                raise entry.error
        return outcomes(entries)

    def plants(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own; a standby will do."""
        # NOTE: not the connection's own block, which ends the transaction first: it and
        # a stream that was not read to its end would wait for each other.
        with explained(self._shown), closing(self._connect(to_read=True)) as connection:
            cursor = connection.cursor(row_factory=args_row(Plant))
            try:
                # NOTE: yield from, so that a reader that stops early closes the stream
                # first: it has a lock that closing the connection needs.
                yield from cursor.stream(READ, size=1000)
            except errors.UndefinedTable:
                if not self._may_create:
                    raise

    def ping(self) -> None:
        self.run(Connection.execute, PROBE)

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Leave the connections to the parent: psycopg closes them nowhere else."""

    def _store(self, batch: Batch) -> None:
        """Store plants as one batch, or each by itself; set ``new`` or ``error``."""
        now = time.monotonic()
        self._locked = {id: pair for id, pair in self._locked.items() if now < pair[0]}
        for entry in batch:
            _, entry.error = self._locked.get(entry.item.id, (now, None))
        batch = [entry for entry in batch if entry.error is None]
        try:
            self._insert_or_compare(batch)
        except StoreUnavailable as ex:
            code = getattr(ex.__cause__, 'sqlstate', None)
            if code is None or code.startswith(NOT_OF_ONE_PLANT):
                raise
            now = time.monotonic()
            if len(batch) == 1 and code == errors.LockNotAvailable.sqlstate:
                # NOTE: not changed in place, since other threads iterate over it.
                found = {batch[0].item.id: (now + LOCKED_FOR, ex)}
                self._locked = self._locked | found
            for entry in batch:
                if len(batch) > 1 and time.monotonic() < now + ALONE_WITHIN:
                    self._store([entry])
                else:
                    entry.error = ex

    def _insert_or_compare(self, batch: Batch) -> None:
        """Insert the plants whose ids are free, and compare the others."""
        first = {entry.item.id: entry for entry in reversed(batch)}
        # In the same order everywhere, so that two batches never wait for each other.
        left = [first[id].item for id in sorted(first)]
        stored: dict[int, Plant] = {}
        attempt = 0
        while left:
            try:
                for id in self.run(Connection.insert_plants, left):
                    first[id].new = True
                    stored[id] = first[id].item
                left = [plant for plant in left if plant.id not in stored]
                if left:
                    stored |= self.run(Connection.lock_plants, left)
                break
            except StoreUnavailable as ex:
                attempt += 1
                is_conflict = isinstance(ex.__cause__, errors.SerializationFailure)
                if not is_conflict or attempt == ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, 0.001 * 2**attempt))
        for entry in batch:
            if stored[entry.item.id] != entry.item:
                entry.error = IdTaken(entry.item.id)

    def run(
        self, function: Callable[..., Result], *arguments: object, repeat: bool = True
    ) -> Result:
        """Call a function with a connection, and once more if the connection is lost.

        The server may have ended an idle session long ago. To repeat an add is safe: a
        committed plant is found, and compared. Raises as ``lend`` does.
        """
        with self.lend() as connection:
            try:
                return function(connection, *arguments)
            except psycopg.Error as ex:
                if isinstance(ex, errors.ReadOnlySqlTransaction):
                    # A standby now; another host may be the primary.
                    connection.close()
                if connection.is_idle() or connection.hangs() or not repeat:
                    raise
        return self.run(function, *arguments, repeat=False)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """Lend a connection.

        Raises:
            StoreUnavailable: The database reports an error, or does not answer.
            StoreClosed: ``close`` was called.
        """
        with self._changed:
            if self._closed:
                raise StoreClosed
            asks = self._outage is not None
            if self._outage is not None and time.monotonic() < self._next_attempt:
                raise StoreUnavailable(self._outage, store=self._shown)
            self._next_attempt = math.inf  # until this caller has asked
            connection = self._idle.pop() if self._idle else None
            self._lent += 1
        outage = None
        try:
            with explained(self._shown):
                connection = connection or self._connect_or_wait()
                connection.start_use()
                yield connection
        except StoreUnavailable as ex:
            # Any other error is an answer of the database.
            if connection is None or connection.hangs():
                outage = ex.reason
            raise
        finally:
            if connection is not None and not connection.is_idle():
                connection.close()
            with self._changed:
                self._lent -= 1
                # A caller from before an outage lets no second one ask when it ends.
                if asks or self._outage is None:
                    self._outage = outage
                    self._next_attempt = time.monotonic() + RETRY_AFTER
                if connection is not None:
                    self._idle.append(connection)
                    if self._closed or connection.closed:
                        # All of them: the cause has probably broken the others, too.
                        while self._idle:
                            self._idle.pop().close()
                self._changed.notify_all()

    def _connect_or_wait(self) -> Connection:
        """Connect; or wait for a connection, if the server allows no more of them."""
        try:
            return self._connect()
        except psycopg.OperationalError:
            with self._changed:
                self._lent -= 1  # callers that fail at once do not wait for each other
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._idle or not self._lent, CONNECT_WITHIN
                )
                self._lent += 1
                if not self._idle:
                    raise
                return self._idle.pop()

    def _connect(self, *, to_read: bool = False) -> Connection:
        changes = {'target_session_attrs': 'any'} if to_read else {}
        connection = Connection.connect(**self._parameters | changes)
        try:
            encoding = connection.info.parameter_status('server_encoding')
            if encoding != 'UTF8':
                reason = f'the database is encoded in {encoding}'
                raise StoreUnavailable(reason, store=self._shown)
            connection.configure(to_read=to_read)
            if not to_read:
                self._check_table(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_table(self, connection: Connection) -> None:
        """Check that plants can be added; make the table if it is missing."""
        try:
            connection.execute(PROBE)
        except errors.UndefinedTable:
            if not self._may_create:
                raise
            # Another process may have entered this name into the catalogue just now.
            with suppress(
                errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
            ):
                connection.execute(CREATE_TABLE)
            connection.execute(PROBE)
        self._may_create = False
