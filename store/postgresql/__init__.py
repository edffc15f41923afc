"""The store for those who outgrow one machine: a PostgreSQL database.

* A *batch* of plants that wait together is one ``INSERT``, one commit. The ``INSERT``
  leaves out rows whose id is taken, and only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if any. So is a repeat: its comparison locks the row and commits.
* When a connection is lost, the batch is sent once more over a new one. What the first
  has committed is found then, and compared.
* Every wait has a limit at the server, and a longer one here for a server that hangs.
* Engines that scale out have no advisory lock, no sequence and no lock of a table.
"""

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from store.base import Create, Plant
from store.errors import IdTaken, StoreUnavailable
from store.group_commit import Entry, GroupCommit, outcomes
from store.lazy import LazyStore
from store.masking import masked
from store.postgresql.connection import CONNECT_WITHIN, Connection, Refused, explained
from store.postgresql.pool import Pool
from store.scheduler import THREADS, Scheduler

Batch = Sequence[Entry[Plant]]
Observe = Callable[[int, float], None]

ATTEMPTS = 9  # to serialize a batch, with pauses of half a second in all
LOCKED_FOR = 0.5  # seconds for which a plant that was found locked is refused at once
ALONE_WITHIN = 1  # second to try the plants of a refused batch, each alone
PROVEN_FOR = 0.1  # seconds for which a commit of a ping proves that commits end


class PostgreSQLStore(LazyStore['Database']):
    """Keep plants in the table ``plants``; as durable as a commit of the database.

    The arguments are those of ``open_store``. A ``ValueError`` does not repeat the URL.
    """

    def __init__(
        self, url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
    ) -> None:
        super().__init__(scheduler=scheduler)
        # libpq takes what follows such a character in a password for the host or a
        # parameter, and its error message shows that. An @ in a parameter looks alike.
        if re.search('(?si)@.*@|[/?#].*@|%(?![0-9a-f]{2})', url.partition('://')[2]):
            raise ValueError(
                'percent-encode in the password: % as %25, @ %40, / %2F, ? %3F, # %23'
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
            with closing(self._open_backend()) as database:
                database.may_create = False
                database.ping()
        except StoreUnavailable as ex:
            if not isinstance(ex.__cause__, errors.UndefinedTable):  # it can be made
                raise

    def _open_backend(self) -> 'Database':
        return Database(self._url, self._create, self._scheduler, self._report_sync)


class Database:
    """Adds plants to a database, and reads them.

    If the database refuses a batch, each plant is tried by itself. One that another
    session has locked delays its batch by two waits of ``LOCK_WITHIN``; its repeats are
    refused at once for ``LOCKED_FOR``, so that they do not delay the next batches.
    """

    def __init__(
        self, url: str, create: Create, scheduler: Scheduler, observe: Observe
    ) -> None:
        self._shown = masked(url)
        self._parameters: dict[str, Any] = {
            'connect_timeout': CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            'target_session_attrs': 'read-write',
            **conninfo_to_dict(url),
            'client_encoding': 'utf8',
            'autocommit': True,
            'prepare_threshold': None,  # unless the session is its own
        }
        self.may_create = create != 'never'
        self.pool = Pool(self._connect, self._shown)
        self._proven = 0.0  # when the last commit of a ping began
        # One stage of group commit is enough, since one statement writes and commits.
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
        with explained(self._shown), closing(self._connect(to_read=True)) as connection:
            try:
                yield from connection.read_plants()
            except errors.UndefinedTable:
                if not self.may_create:
                    raise

    def ping(self) -> None:
        # Anybody may ask, so not every ping costs a commit.
        began = time.monotonic()
        commits = began > self._proven + PROVEN_FOR
        self.pool.run(Connection.probe, commits)
        if commits:
            self._proven = began

    def close(self) -> None:
        self.pool.close()

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
        except Refused as ex:
            now = time.monotonic()
            if len(batch) == 1 and isinstance(ex.__cause__, errors.LockNotAvailable):
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
        # In one order everywhere, so that two batches never wait for each other.
        left = [first[id].item for id in sorted(first)]
        stored: dict[int, Plant] = {}
        attempt = 0
        while left:
            try:
                for id in self.pool.run(Connection.insert_plants, left):
                    first[id].new = True
                    stored[id] = first[id].item
                left = [plant for plant in left if plant.id not in stored]
                if left:
                    stored |= self.pool.run(Connection.lock_plants, left)
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

    def _connect(self, *, to_read: bool = False) -> Connection:
        changes = {'target_session_attrs': 'any'} if to_read else {}
        connection = Connection.connect(**self._parameters | changes)
        try:
            if (name := connection.info.parameter_status('server_encoding')) != 'UTF8':
                reason = f'the database is encoded in {name}'
                raise StoreUnavailable(reason, store=self._shown)
            connection.configure(to_read=to_read)
            if not to_read:
                connection.check_table(may_create=self.may_create)
                self.may_create = False
        except BaseException:
            connection.close()
            raise
        return connection
