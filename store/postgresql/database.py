"""A database in use by this process: batches, comparisons and attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
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
    CONFLICTS,
    CREATE_TABLE,
    PROBE,
    READ,
    RULES,
    Connection,
    PlantLocked,
    refusal,
)
from store.postgresql.pool import Outage, Pool
from store.scheduler import Scheduler
from store.url import masked

Result = TypeVar('Result')
Batch = Sequence[Entry[Plant]]
# The result of a statement for a plant: the plant that is stored with its id, ``None``
# if it has just been inserted, or the reason why it cannot be stored now.
Found = Plant | StoreUnavailable | None
Statement = Callable[[Connection, Sequence[Plant]], Mapping[int, Found]]


class Database:
    """Adds plants to a database, and reads them.

    There are two kinds of batches. Most plants are in the first kind, which waits only
    ``LOCK_WITHIN`` for a lock of another session. Then the batch is halved until the
    locked plants are alone. These go into batches of the second kind, of which one at a
    time is in flight. Their ids are remembered, so that their repeats go there at once.
    So a locked row takes one connection, and delays no other plant for long.
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
        # The append does nothing: one statement writes and commits, so it is the sync.
        commit = partial(GroupCommit[Plant, Batch], lambda b: b, scheduler=scheduler)
        most = limits.BATCHES_IN_FLIGHT
        self._batches = commit(self._store, slow_syncs_in_flight=most, observe=observe)
        self._locked_batches = commit(self._store_locked, slow_syncs_in_flight=1)
        self._locked_ids: set[int] = set()
        self._pool = Pool(self._connect)
        self._outage = Outage(self._shown)
        self._checked = False

    def add(self, plant: Plant) -> bool:
        # An empty name takes room in a batch, too.
        size = 32 + len(plant.name) + len(plant.tag or '')
        if plant.id not in self._locked_ids:
            with suppress(PlantLocked):
                return self._batches.submit(plant, size)
        return self._locked_batches.submit(plant, size)

    def add_many(self, plants: Sequence[Plant]) -> list[bool | IdTaken]:
        batch = [Entry(plant, 0) for plant in plants]
        for start in range(0, len(batch), limits.MOST_ROWS):
            self._store_locked(batch[start : start + limits.MOST_ROWS])
        for entry in batch:
            if isinstance(entry.error, StoreUnavailable):
                raise entry.error
        return outcomes(batch)

    def plants(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own; a standby will do."""
        parameters = self._parameters | {'target_session_attrs': 'any'}
        # NOTE: not the connection's own block, which ends the transaction first: it and
        # a stream that was not read to its end would wait for each other.
        with (
            self._explained(),
            closing(Connection.connect(**parameters)) as connection,
        ):
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
            self._run(lambda connection: connection.execute(PROBE))

    def close(self) -> None:
        self._pool.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Keep the connections, which are the parent's: to close them would warn."""
        _abandoned.append(self)

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
        """Check that the database can be used; make the table if that is permitted.

        If the table exists, the right to make it is not needed. A process may fail to
        make it because another one has just entered the same name into the catalogue of
        the server. Then the table exists.
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

    def _check_encoding(self, connection: Connection) -> None:
        encoding = connection.info.parameter_status('server_encoding')
        if encoding != 'UTF8':
            reason = f'the database is encoded in {encoding}'
            raise StoreUnavailable(reason, store=self._shown)

    def _store_locked(self, batch: Batch) -> None:
        """Store plants; try those that are locked again, for ``LOCKED_WITHIN``."""
        deadline = time.monotonic() + limits.LOCKED_WITHIN
        while batch and time.monotonic() < deadline:
            self._store(batch)
            batch = [entry for entry in batch if isinstance(entry.error, PlantLocked)]

    def _store(self, batch: Batch) -> None:
        """Insert the new plants of a batch, and compare the others."""
        first: dict[int, Plant] = {}
        for entry in batch:
            first.setdefault(entry.item.id, entry.item)
        # In the same order everywhere, so that two batches never wait for each other.
        with self._explained():
            found = self._find_or_insert([first[id] for id in sorted(first)])
        refused = []
        for entry in batch:
            id = entry.item.id
            stored = found[id]
            entry.new = stored is None
            entry.error = None
            if isinstance(stored, StoreUnavailable):
                entry.error = stored
                if entry.item != first[id]:
                    refused.append(entry)
            elif stored is None:
                found[id] = entry.item  # later in this batch it is not new
            elif stored != entry.item:
                entry.error = IdTaken(id)
        self._remember_locked(found)
        if refused:  # because of another plant in this batch with the same id
            self._store(refused)

    def _remember_locked(self, found: Mapping[int, Found]) -> None:
        locked = {id for id, stored in found.items() if isinstance(stored, PlantLocked)}
        if len(self._locked_ids) + len(locked) > limits.MOST_LOCKED_IDS:
            self._locked_ids.clear()
        self._locked_ids -= found.keys()
        self._locked_ids |= locked

    def _find_or_insert(self, plants: Sequence[Plant]) -> dict[int, Found]:
        """Insert the plants or find the stored ones; return the result for each id."""
        found: dict[int, Found] = {}
        conflict: psycopg.Error = errors.SerializationFailure(
            'the conflicting row is not visible'
        )
        deadline = time.monotonic() + limits.LOCKED_WITHIN
        for attempt in range(limits.ATTEMPTS):
            if attempt:
                time.sleep(_random.uniform(0, 0.001 * 2**attempt))
            try:
                # A row that is deleted between the two statements is inserted by the
                # next attempt.
                for statement in (Connection.insert_plants, Connection.lock_plants):
                    left = [plant for plant in plants if plant.id not in found]
                    if not left:
                        return found
                    for part in self._execute(statement, left, deadline):
                        found |= part
            except CONFLICTS as ex:
                conflict = ex
        why = refusal(conflict, self._shown)
        return {plant.id: found.get(plant.id, why) for plant in plants}

    def _execute(
        self, statement: Statement, plants: Sequence[Plant], deadline: float
    ) -> Iterator[Mapping[int, Found]]:
        """Yield the results of a statement, run by halves if a plant makes it fail."""
        try:
            yield self._run(lambda connection: statement(connection, plants))
        except (*RULES, errors.LockNotAvailable) as ex:
            # With a locked table halving would take too long: it ends at the deadline.
            if len(plants) == 1 or (
                isinstance(ex, errors.LockNotAvailable) and time.monotonic() > deadline
            ):
                why = refusal(ex, self._shown)
                why.__cause__ = ex
                yield dict.fromkeys([plant.id for plant in plants], why)
                return
            middle = len(plants) // 2
            yield from self._execute(statement, plants[:middle], deadline)
            yield from self._execute(statement, plants[middle:], deadline)

    def _run(
        self, function: Callable[[Connection], Result], *, new: bool = False
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
                return function(connection)
            except psycopg.Error as ex:
                if connection.hangs():
                    # Without this, a session that waits for a standby would go on
                    # waiting for no client, and soon there would be many of them.
                    with suppress(psycopg.Error):
                        connection.cancel_safe(timeout=limits.CANCEL_WITHIN)
                    raise refusal(ex, self._shown) from ex
                if new or not connection.closed:
                    if isinstance(ex, errors.ReadOnlySqlTransaction):
                        # A standby now; another host may be the primary.
                        connection.close()
                    raise
        return self._run(function, new=True)

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


# Not the shared generator, which a program may seed for a purpose of its own.
_random = random.Random()

# Databases whose connections a forked child has inherited from its parent.
_abandoned: list[Database] = []
