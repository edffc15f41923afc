"""A database in use by this process: batches, comparisons and attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from psycopg import errors
from psycopg.rows import args_row

from store.base import Create, Plant
from store.errors import IdTaken, StoreUnavailable
from store.group_commit import Entry, GroupCommit, outcomes
from store.postgresql.connection import NOT_OF_ONE_PLANT, READ, Connection, explained
from store.postgresql.pool import Pool
from store.scheduler import Scheduler

Batch = Sequence[Entry[Plant]]

# In seconds: a plant that was found locked is refused at once for so long.
LOCKED_FOR = 0.5
# In seconds: for the plants of a refused batch, each by itself, until the last begins.
ALONE_WITHIN = 1
# For a batch that the server cannot serialize, with pauses of half a second in all.
ATTEMPTS = 9


class Database(Pool):
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
        super().__init__(url, create)
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

    def abandon(self) -> None:  # pragma: no cover - in a child of a fork
        """Keep the connections, which are the parent's: to close them would warn."""
        _abandoned.append(self)

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


# Databases whose connections a forked child has inherited from its parent.
_abandoned: list[Database] = []
