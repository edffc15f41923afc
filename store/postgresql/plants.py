"""Adds plants to the table of a database, in batches, and reads them."""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from store.base import Plant
from store.committer import Entry
from store.errors import IdTaken
from store.postgresql.connection import ANSWER_WITHIN
from store.postgresql.database import Database
from store.postgresql.reasons import Unavailable
from store.postgresql.table import Table
from store.postgresql.target import Target

log = logging.getLogger(__name__)

ATTEMPTS = 9  # to serialize a batch; the pauses are half a second at most in all
LOCKED_FOR = 0.5  # seconds for which a plant that was found locked is refused at once
PROBE_EVERY = 1  # second: the least time between two probes of a whole add


class Plants:
    """The backend of the store: see ``store/committer.py``.

    If the database refuses a batch, each plant is tried by itself. If another session
    has locked a plant, its repeats are refused at once for a while, and delay no batch.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._database = Database(target)
        self._table = Table(self._database)
        self._probed = -math.inf  # when the last probe of a whole add began
        self._refusal: Unavailable | None = None  # what it found
        # Of plants that were found locked: until when to repeat the error.
        self._locked: dict[int, tuple[float, Unavailable]] = {}
        self._problem = ''  # that the log has told
        self.close = self._database.close

    def append(self, batch: Sequence[Entry]) -> Callable[[], None]:
        return partial(self._tell, self._add, batch)

    def ping(self) -> None:
        self._tell(self._ping)

    def read(self) -> Iterator[Plant]:
        """Yield all plants, over a connection of its own; a standby suffices."""
        with closing(Database(self._target, to_read=True)) as database:
            try:
                yield from Table(database).read()
            except Unavailable as ex:
                if not (
                    ex.code == '42P01' and self._target.create
                ):  # an add would make it
                    raise

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function; log what is wrong when that changes.

        The callers of a batch are many, and may be gone when a connection fails. So
        what libpq and the server said is logged here, and not with each answer.
        """
        try:
            function(*arguments)
        except Unavailable as ex:
            if ex.retry not in ('each', 'batch'):
                if self._problem != (problem := str(ex)):
                    log.warning('%s', problem)
                self._problem = problem
                ex.args = (f'{ex.store}: {ex.reason}',)
            raise
        if self._problem:
            log.warning('%s: the database takes plants again', self._target.shown)
        self._problem = ''

    def _ping(self) -> None:
        self._table.check()
        # Anybody may ask, so one ping a second does all that an add does.
        if (now := time.monotonic()) >= self._probed + PROBE_EVERY:
            self._probed, self._refusal = now, None
            try:
                self._table.probe()
            except Unavailable as ex:
                self._refusal = ex
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def _add(self, batch: Sequence[Entry]) -> None:
        now = time.monotonic()
        self._locked = {id: it for id, it in self._locked.items() if now < it[0]}
        for entry in batch:
            _, entry.error = self._locked.get(entry.item.id, (now, None))
        if free := [entry for entry in batch if entry.error is None]:
            self._store(free, now + ANSWER_WITHIN)

    def _store(self, batch: Sequence[Entry], deadline: float) -> None:
        """Store plants as one batch, or each by itself; set ``new`` or ``error``."""
        for attempt in range(ATTEMPTS):
            try:
                return self._insert_or_compare(batch)
            except Unavailable as ex:
                error = ex
            if error.retry != 'batch':
                break
            time.sleep(random.uniform(0, 0.002 * 2**attempt))
        if error.retry not in ('each', 'batch'):
            raise error
        if len(batch) == 1:
            batch[0].error = error
            if error.code == '55P03':
                until = time.monotonic() + LOCKED_FOR
                self._locked[batch[0].item.id] = until, error
            return None
        for entry in batch:
            if time.monotonic() < deadline:
                self._store([entry], deadline)
            else:  # nothing is known of this one
                entry.error = Unavailable('57014', self._target.shown)
        return None

    def _insert_or_compare(self, batch: Sequence[Entry]) -> None:
        """Insert the plants whose ids are free, and compare the others."""
        first = {entry.item.id: entry for entry in reversed(batch)}
        # In one order everywhere, so that two batches never wait for each other.
        plants = [first[id].item for id in sorted(first)]
        stored: dict[int, Plant] = {}
        for id in self._table.insert(plants):
            first[id].new, stored[id] = True, first[id].item
        if left := [plant for plant in plants if plant.id not in stored]:
            stored |= self._table.lock(left)
        for entry in batch:
            if stored[entry.item.id] != entry.item:
                entry.error = IdTaken(entry.item.id)
