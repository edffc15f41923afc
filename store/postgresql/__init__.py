"""The store for those who outgrow one machine: a PostgreSQL database.

* A *batch* of plants that wait together is one ``INSERT``, one commit. The ``INSERT``
  leaves out rows whose id is taken, and only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if any. To compare a repeat the store locks the row and commits.
* When a connection is lost, the batch is sent once more over a new one. Plants that the
  first attempt has committed are then found, and compared.
* Every wait has a limit at the server, and a longer one here for a server that hangs.
* Engines that scale out lack advisory locks, sequences and table locks: none is used.
"""

import logging
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from store.base import Create, Plant
from store.errors import IdTaken, StoreUnavailable
from store.group_commit import Entry
from store.lazy import LazyStore
from store.masking import masked
from store.postgresql import connection as limits
from store.postgresql.connection import Connection, Hosts
from store.postgresql.pool import Pool
from store.postgresql.reasons import Unavailable, explained
from store.postgresql.table import Table, find_table
from store.scheduler import THREADS, Scheduler

log = logging.getLogger(__name__)

Batch = Sequence[Entry[Plant]]

ATTEMPTS = 9  # to serialize a batch; the pauses are half a second at most in all
LOCKED_FOR = 0.5  # seconds for which a plant that was found locked is refused at once
PROBE_EVERY = 1  # second: the least time between two probes of a whole add


class PostgreSQLStore(LazyStore['Database']):
    """Keep plants in the table ``plants``; as durable as a commit of the database.

    The arguments are those of ``open_store``. A ``ValueError`` does not repeat the URL.
    """

    def __init__(
        self, url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
    ) -> None:
        super().__init__(masked(url), scheduler=scheduler)
        # libpq takes the rest of a password after such a character for the host or a
        # parameter, and shows it in an error. An @ in a parameter looks the same.
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
            with closing(Database(self._url, 'never')) as database:
                database.ping()
        except Unavailable as ex:
            if ex.code != '42P01':  # a missing table can be made
                raise

    def _open_backend(self) -> 'Database':
        return Database(self._url, self._create)

    def _record(self, plant: Plant) -> tuple[Plant, int]:
        return plant, len(plant.name) + len(plant.tag or '')


class Database:
    """Adds plants to a database, and reads them.

    If the database refuses a batch, each plant is tried by itself. If another session
    has locked a plant, its repeats are refused at once for a while, and delay no batch.
    """

    def __init__(self, url: str, create: Create) -> None:
        self._names = masked(url), url
        parameters: dict[str, Any] = {
            'connect_timeout': limits.CONNECT_WITHIN,
            'fallback_application_name': 'plants',
            # libpq's GSSAPI ends a forked process on macOS (gunicorn issue 1701).
            **({'gssencmode': 'disable'} if sys.platform == 'darwin' else {}),
            **conninfo_to_dict(url),
            'target_session_attrs': 'any',  # see Connection._configure
            'client_encoding': 'utf8',
        }
        options = parameters.get('options') or os.environ.get('PGOPTIONS', '')
        self._names_schema = 'search_path' in str(options)
        self._hosts = Hosts(parameters, url)
        self._table = Table()
        self.may_create = create != 'never'
        self.pool = Pool(self._connect, *self._names)
        self._probed = -math.inf  # when the last probe of a whole add began
        self._refusal: Unavailable | None = None  # what it found
        # Of plants that were found locked: the error, and until when to repeat it.
        self._locked: dict[int, tuple[float, Unavailable]] = {}

    def append(self, batch: Batch) -> Callable[[], None]:
        return partial(self._store, batch)

    def plants(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own; a standby suffices."""
        with explained(*self._names):
            deadline = time.monotonic() + limits.ANSWER_WITHIN
            try:
                connection = self._connect(deadline, to_read=True)
            except errors.UndefinedTable:
                if not self.may_create:
                    raise
                return
            with closing(connection):
                connection.start_use(math.inf)
                yield from self._table.read(connection)

    def ping(self) -> None:
        now = time.monotonic()
        self.pool.run(now + limits.ANSWER_WITHIN, self._table.check)
        # Anybody may ask, so one ping a second does all that an add does.
        if now >= self._probed + PROBE_EVERY:
            self._probed, self._refusal = now, None
            try:
                self.pool.run(now + limits.ANSWER_WITHIN, self._table.probe)
            except Unavailable as ex:
                self._refusal = ex
        if self._refusal:
            raise self._refusal

    def close(self) -> None:
        self.pool.close()

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Leave the connections open: psycopg closes them only in the parent."""

    def _store(self, batch: Batch, deadline: float | None = None) -> None:
        """Store plants as one batch, or each by itself; set ``new`` or ``error``."""
        now = time.monotonic()
        deadline = deadline or now + limits.ANSWER_WITHIN
        self._locked = {id: pair for id, pair in self._locked.items() if now < pair[0]}
        for entry in batch:
            _, entry.error = self._locked.get(entry.item.id, (now, None))
        batch = [entry for entry in batch if entry.error is None]
        if not batch:
            return
        try:
            self._insert_or_compare(batch, deadline)
        except Unavailable as ex:
            if ex.retry not in ('each', 'batch'):
                raise
            if len(batch) > 1:
                for entry in batch:
                    if time.monotonic() < deadline:
                        self._store([entry], deadline)
                    else:  # nothing is known of this one
                        entry.error = Unavailable('57014', self._names[0])
                return
            batch[0].error = ex
            if ex.code == '55P03':
                again = time.monotonic() + LOCKED_FOR
                # NOTE: not changed in place, since other threads iterate over it.
                self._locked = {**self._locked, batch[0].item.id: (again, ex)}

    def _insert_or_compare(self, batch: Batch, deadline: float) -> None:
        """Insert the plants whose ids are free, and compare the others."""
        first = {entry.item.id: entry for entry in reversed(batch)}
        # In one order everywhere, so that two batches never wait for each other.
        left = [first[id].item for id in sorted(first)]
        stored: dict[int, Plant] = {}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for id in self.pool.run(deadline, self._table.insert, left):
                    first[id].new = True
                    stored[id] = first[id].item
                left = [plant for plant in left if plant.id not in stored]
                if left:
                    stored |= self.pool.run(deadline, self._table.lock, left)
                break
            except Unavailable as ex:
                if ex.retry != 'batch' or attempt == ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, 0.001 * 2**attempt))
        for entry in batch:
            if stored[entry.item.id] != entry.item:
                entry.error = IdTaken(entry.item.id)

    def _connect(self, deadline: float, *, to_read: bool = False) -> Connection:
        connection = self._hosts.connect(deadline, to_read=to_read)
        try:
            if (name := connection.info.parameter_status('server_encoding')) != 'UTF8':
                reason = f'the database is encoded in {name}'
                raise StoreUnavailable(reason, store=self._names[0])
            if not self._table.name:
                may_create = self.may_create and not to_read
                self._table.use(find_table(connection, may_create, self._names_schema))
                log.info('%s: the table is %s', self._names[0], self._table.name)
            if not to_read:
                self._table.check(connection)
        except BaseException:
            connection.close()
            raise
        return connection
