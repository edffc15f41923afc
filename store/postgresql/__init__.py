"""The store for those who outgrow one machine: a PostgreSQL database.

* A process has one connection, which the committer uses. A *batch* of plants is one
  ``INSERT``, which leaves out rows whose id is taken: only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if any. To compare a repeat the store locks the row and commits.
* A connection that was lost before a batch was sent is opened again. If it is lost
  between sending and answer, nobody knows what was stored: the adds are refused.
* Engines that scale out lack advisory locks, sequences and table locks: none is used.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from store.base import Entry, Plant
from store.committer import CommittedStore
from store.errors import IdTaken
from store.postgresql.connection import ANSWER_WITHIN
from store.postgresql.database import Target, Unavailable
from store.postgresql.table import Table
from store.scheduler import THREADS, Scheduler

PROBE_EVERY = 1  # second: the least time between two probes of a whole add


class PostgreSQLStore(CommittedStore):
    """Keep plants in a table; durable as a commit; arguments as of ``open_store``."""

    def __init__(
        self, url: str, *, create: bool = True, scheduler: Scheduler = THREADS
    ) -> None:
        self._target = Target(url, create, scheduler)
        super().__init__(self._target.shown, scheduler=scheduler)

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        with closing(Table(self._target, to_read=True)) as table:
            try:
                yield from table.read()
            except Unavailable as ex:
                if ex.code != 'missing' or not self._target.create:  # an add makes it
                    raise

    def _open_backend(self) -> 'Plants':
        return Plants(self._target)


class Plants(Table):
    """Adds plants to a database, for the committer."""

    _probed = 0.0  # when a probe of a whole add last succeeded

    def ping(self) -> None:
        # Anybody may ask, so one ping a second does all that an add does, and writes.
        if time.monotonic() >= self._probed + PROBE_EVERY:
            self.probe()
            self._probed = time.monotonic()

    def append(self, batch: Sequence[Entry]) -> Callable[[], None]:
        # In one order everywhere, so that two batches never wait for each other.
        ordered = sorted(batch, key=lambda entry: entry.item.id)
        return partial(self._store, ordered, time.monotonic() + ANSWER_WITHIN)

    def _store(self, batch: Sequence[Entry], deadline: float) -> None:
        """Store plants, sorted, as one batch or in halves; set ``new`` or ``error``."""
        is_one = all(entry.item == batch[0].item for entry in batch)
        for attempt in range(9 if is_one else 3):  # half a second at most in all
            try:
                self._insert_or_compare(batch)
                return
            except Unavailable as ex:
                if ex.retry not in ('each', 'rule', 'batch'):
                    raise
                error = ex
            if error.retry != 'batch':
                break
            time.sleep(random.uniform(0, 0.002 * 2**attempt))
        if not is_one and time.monotonic() < deadline:
            self._store(batch[: len(batch) // 2], deadline)
            self._store(batch[len(batch) // 2 :], deadline)
        else:  # of several it may be the error of another one
            for entry in batch:
                entry.error = error

    def _insert_or_compare(self, batch: Sequence[Entry]) -> None:
        """Insert the plants whose ids are free, and compare the others."""
        first = {entry.item.id: entry for entry in reversed(batch)}
        plants = [entry.item for entry in reversed(first.values())]
        stored = self.insert(plants)
        for id in first.keys() & stored.keys():
            first[id].new = True
        if left := [plant for plant in plants if plant.id not in stored]:
            stored |= self.lock(left)
        for entry in batch:
            if (it := stored[entry.item.id]) != entry.item:
                altered = self._target.unavailable('altered') if entry.new else None
                entry.error = altered or IdTaken.between(it, entry.item)
