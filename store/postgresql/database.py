"""A database in use by this process: batches, comparisons and attempts."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import args_row

from store.base import Create, Plant
from store.errors import IdTaken, StoreUnavailable
from store.group_commit import Entry, GroupCommit, outcomes
from store.postgresql import limits
from store.postgresql.connection import (
    CREATE_TABLE,
    PROBE,
    READ,
    Connection,
    may_concern_one_plant,
    refusal,
)
from store.postgresql.pool import Outage, Pool
from store.scheduler import Scheduler
from store.url import masked

Result = TypeVar('Result')
Batch = Sequence[Entry[Plant]]


class Database:
    """Adds plants to a database, and reads them.

    Plants that wait together are stored as one batch. If the database refuses a batch,
    each plant is tried by itself. So a plant that breaks a rule is refused alone, and
    one that another session has locked delays the others of its batch by two waits of
    ``LOCK_WITHIN``. To put it into the next batches would delay those too, so its
    repeats are refused at once for ``LOCKED_FOR``.
    """

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
            'connect_timeout': limits.CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
        }
        # The first stage of group commit hands the batch over to the second, since one
        # statement writes and commits.
        self._batches = GroupCommit[Plant, Batch](
            lambda batch: batch,
            self._store,
            scheduler=scheduler,
            observe=observe,
        )
        # Of plants that were found locked: when to try again, and the error until then.
        self._locked: dict[int, tuple[float, StoreUnavailable]] = {}
        self._pool = Pool(self._connect)
        self._outage = Outage(self._shown)
        self._checked = False

    def add(self, plant: Plant) -> bool:
        return self._batches.submit(plant, _size(plant))

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        entries = [Entry(plant, _size(plant)) for plant in plants]
        batch: list[Entry[Plant]] = []
        room = limits.MOST_CHARACTERS
        for entry in entries:
            batch.append(entry)
            room -= entry.size
            if room <= 0 or entry is entries[-1]:
                self._store(batch)
                batch, room = [], limits.MOST_CHARACTERS
        for entry in entries:
            if isinstance(entry.error, StoreUnavailable):
                raise entry.error
        return outcomes(entries)

    def plants(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own; a standby will do."""
        # NOTE: not the connection's own block, which ends the transaction first: it and
        # a stream that was not read to its end would wait for each other.
        with self._explained(), closing(self._connect_to_read()) as connection:
            self._check_encoding(connection)
            # Reading all plants takes as long as the reader likes.
            connection.configure(0, limits.STATEMENT_WITHIN)
            rows = connection.cursor(row_factory=args_row(Plant)).stream(
                READ, size=1000
            )
            try:
                # NOTE: yield from, so that a reader that stops early closes the stream
                # first: it has a lock that closing the connection needs.
                yield from rows
            except errors.UndefinedTable:
                if self._create == 'never':
                    raise

    def ping(self) -> None:
        with self._explained():
            self._run(Connection.execute, PROBE)

    def close(self) -> None:
        self._pool.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Keep the connections, which are the parent's: to close them would warn."""
        _abandoned.append(self)

    def _connect_to_read(self) -> Connection:
        try:
            return Connection.connect(
                **self._parameters | {'target_session_attrs': 'any'}
            )
        except psycopg.OperationalError:
            # The server may allow no more connections than those of the pool.
            connection = self._pool.remove()
            if connection is None:
                raise
            connection.start_use(math.inf)
            return connection

    def _connect(self) -> Connection:
        with self._explained():
            connection = Connection.connect(**self._parameters)
            try:
                connection.configure(limits.STATEMENT_WITHIN, limits.LOCK_WITHIN)
                if not self._checked:
                    self._check(connection)
                    self._checked = True
            except BaseException:
                connection.close()
                raise
            return connection

    def _check(self, connection: Connection) -> None:
        """Check that the database can be used; make the table if it is missing."""
        self._check_encoding(connection)
        try:
            connection.execute(PROBE)
        except errors.UndefinedTable:
            if self._create == 'never':
                raise
            # Another process may have entered this name into the catalogue just now.
            with suppress(
                errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
            ):
                connection.execute(CREATE_TABLE)
            connection.execute(PROBE)

    def _check_encoding(self, connection: Connection) -> None:
        encoding = connection.info.parameter_status('server_encoding')
        if encoding != 'UTF8':
            reason = f'the database is encoded in {encoding}'
            raise StoreUnavailable(reason, store=self._shown)

    def _store(self, batch: Batch) -> None:
        """Store plants as one batch, or each by itself; set ``new`` or ``error``."""
        batch = [entry for entry in batch if not self._refuse_locked(entry)]
        if not batch:
            return
        try:
            with self._explained():
                self._insert_or_compare(batch)
        except StoreUnavailable as ex:
            if not may_concern_one_plant(ex):
                raise
            if len(batch) == 1 and isinstance(ex.__cause__, errors.LockNotAvailable):
                self._remember_locked(batch[0].item.id, ex)
            deadline = time.monotonic() + limits.ALONE_WITHIN
            for entry in batch:
                if len(batch) > 1 and time.monotonic() < deadline:
                    self._store([entry])
                else:
                    entry.error = ex

    def _refuse_locked(self, entry: Entry[Plant]) -> bool:
        """Refuse a plant that was found locked a moment ago; return whether it was."""
        until, error = self._locked.get(entry.item.id, (0, None))
        entry.error = error if time.monotonic() < until else None
        return entry.error is not None

    def _remember_locked(self, id: int, error: StoreUnavailable) -> None:
        now = time.monotonic()
        locked = {id: pair for id, pair in self._locked.items() if now < pair[0]}
        self._locked = locked | {id: (now + limits.LOCKED_FOR, error)}

    def _insert_or_compare(self, batch: Batch) -> None:
        """Insert the plants whose ids are free, and compare the others."""
        first = {entry.item.id: entry for entry in reversed(batch)}
        # In the same order everywhere, so that two batches never wait for each other.
        left = [first[id].item for id in sorted(first)]
        stored: dict[int, Plant] = {}
        conflict: psycopg.Error = errors.SerializationFailure(
            'the conflicting row is not visible'
        )
        for attempt in range(limits.ATTEMPTS):
            if attempt:
                time.sleep(_random.uniform(0, 0.001 * 2**attempt))
            try:
                for id in self._run(Connection.insert_plants, left):
                    first[id].new = True
                    stored[id] = first[id].item
                left = [plant for plant in left if plant.id not in stored]
                if left:
                    stored |= self._run(Connection.lock_plants, left)
                # A row that was deleted meanwhile is inserted by the next attempt.
                left = [plant for plant in left if plant.id not in stored]
                if not left:
                    break
            except errors.SerializationFailure as ex:
                conflict = ex
        else:
            raise conflict
        for entry in batch:
            if stored[entry.item.id] != entry.item:
                entry.error = IdTaken(entry.item.id)

    def _run(
        self,
        function: Callable[..., Result],
        *arguments: object,
        new: bool = False,
    ) -> Result:
        """Call a function with a connection, and once more if the connection is lost.

        The server may have ended an idle session long ago. The second connection is a
        new one. To repeat an add is safe: a committed plant is found, and compared.

        Raises:
            StoreUnavailable: The database does not answer.
            TimeoutError: All connections are in use.
            psycopg.Error: Any other error of the server.
        """
        with self._outage.watch(), self._pool.lend(new=new) as connection:
            try:
                return function(connection, *arguments)
            except psycopg.Error as ex:
                if connection.hangs():
                    # Without this, a session that waits for a standby would go on
                    # waiting for no client, and soon there would be many of them.
                    with suppress(psycopg.Error):
                        connection.cancel_safe(timeout=limits.CANCEL_WITHIN)
                    raise refusal(ex, self._shown) from ex
                if not connection.is_idle():  # lost, also if libpq has not noticed
                    connection.close()
                if new or not connection.closed:
                    if isinstance(ex, errors.ReadOnlySqlTransaction):
                        # A standby now; another host may be the primary.
                        connection.close()
                    raise
        return self._run(function, *arguments, new=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the server into exceptions of a store."""
        try:
            yield
        except TimeoutError as ex:
            reason = 'all connections to the database are in use'
            raise StoreUnavailable(reason, store=self._shown) from ex
        except psycopg.Error as ex:
            raise refusal(ex, self._shown) from ex


def _size(plant: Plant) -> int:
    return limits.ROW + len(plant.name) + len(plant.tag or '')


# Not the shared generator, which a program may seed for a purpose of its own.
_random = random.Random()

# Databases whose connections a forked child has inherited from its parent.
_abandoned: list[Database] = []
