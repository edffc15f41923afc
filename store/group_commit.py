"""Group commit: records that wait together are written and synced together.

There is no background thread. A caller that finds no append in progress becomes the
*leader*: it takes every record that waits (its own is the first), appends them as one
*batch*, syncs them, and wakes its *followers*, which have slept meanwhile. The next
leader is the first caller that is still waiting.

Appends exclude each other. Syncs need not, since a sync covers every byte that was
written before it began. How many may be in flight follows the measured time of a sync:

* Where it is quick (tens of microseconds, a disk with a battery), the system calls and
  thread switches around it are the cost. So one is in flight, and the next batch grows.
* Where it is slow (milliseconds, an ordinary disk), a caller that just misses a batch
  would wait for two syncs. Several in flight overlap, and the disk groups them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

from store.errors import StoreUnavailable
from store.scheduler import Scheduler

Item = TypeVar('Item')
Written = TypeVar('Written')

# A sync that takes longer than this, in seconds, is worth overlapping with others.
SLOW_SYNC = 0.000_5
SLOW_SYNCS_IN_FLIGHT = 4
# The size of a full batch: a crowd of large records must not make a small one slow.
BATCH_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False, repr=False)
class Entry(Generic[Item]):
    """A record on its way to the disk; equal only to itself."""

    item: Item
    size: int  # in bytes
    # Set by the append or the sync: what submit() returns, or raises.
    new: bool = False
    error: BaseException | None = None
    _leads: bool = False
    _wake: Callable[[], object] = field(init=False)  # set when its caller waits


def outcomes(batch: Sequence[Entry[Any]]) -> list[Any]:
    """Return the outcome of each record: its error, or whether it is new."""
    return [entry.error or entry.new for entry in batch]


class GroupCommit(Generic[Item, Written]):
    """Turn concurrent calls of ``submit`` into batches.

    Args:
        append: Called with a batch, one call at a time; it writes the records. An
            ``Exception`` that it raises reaches every caller of the batch. Any other
            ``BaseException`` reaches the leader; its followers get
            ``StoreUnavailable``. It may set an entry's ``error`` instead. It returns
            the argument of ``sync``; if that is false there is no sync.
        sync: Called with the result of ``append``; when it returns, the batch is
            durable. Calls may overlap. It reports errors in the same two ways.
        scheduler: How the callers wait.
        observe: Called before the callers return, as ``PlantStore.on_sync``.
    """

    def __init__(
        self,
        append: Callable[[Sequence[Entry[Item]]], Written],
        sync: Callable[[Written], None],
        *,
        scheduler: Scheduler,
        observe: Callable[[int, float], None],
    ) -> None:
        self._scheduler = scheduler
        self._append = append
        self._sync = sync
        self._observe = observe
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._waiting: deque[Entry[Item]] = deque()
        self._appending = False
        self._syncing = 0
        self._sync_limit = 1

    def submit(self, item: Item, size: int) -> bool:
        """Return the ``new`` of a record when it is durable, or raise its ``error``."""
        entry = Entry(item, size)
        try:
            with self._lock:
                must_wait = self._appending or self._syncing >= self._sync_limit
                if must_wait:
                    wait, entry._wake = self._scheduler.waiter()
                else:
                    entry._leads = self._appending = True
                self._waiting.append(entry)  # last: the next leader can wake it
            if must_wait:
                wait()
        except BaseException:  # Ctrl-C; but a leader must serve its followers
            with self._lock, suppress(ValueError):
                if not entry._leads:
                    self._waiting.remove(entry)
            raise
        finally:
            if entry._leads:
                self._lead()
        if entry.error is not None:
            raise entry.error
        return entry.new

    def _lead(self) -> None:
        """Take a batch through both stages. REQUIRES: _appending is set for it."""
        batch: list[Entry[Item]] = []
        written: Written | None = None
        try:
            try:
                self._gather()
            finally:
                batch = self._take_batch()
            written = self._append(batch)
        except BaseException as ex:  # also Ctrl-C: the followers must wake up
            _fail(batch, ex)
        with self._lock:
            self._appending = False
            self._syncing += bool(written)
            self._wake_leader()
        # From here on the next batch may be appended while this one is synced. It
        # may even be durable first: no caller waits for both.
        if written:
            began, failed = perf_counter(), False
            try:
                self._scheduler.call(partial(self._sync, written))
            except BaseException as ex:
                _fail(batch, ex)
                failed = True
            took = perf_counter() - began
            with self._lock:
                self._syncing -= 1
                # A quick failure must not make the next batches wait for a slow one.
                is_slow = failed or took > SLOW_SYNC
                self._sync_limit = SLOW_SYNCS_IN_FLIGHT if is_slow else 1
                self._wake_leader()
            self._observe(len(batch), took)
        for entry in batch:
            if not entry._leads:
                entry._wake()

    def _gather(self) -> None:
        """Let callers submit that are about to, so that they share this batch."""
        gathered, more = 0, True
        while more and gathered < len(self._waiting):
            gathered = len(self._waiting)
            more = self._scheduler.give_way()

    def _take_batch(self) -> list[Entry[Item]]:
        batch, size = [], 0
        with self._lock:
            while self._waiting and size < BATCH_BYTES:
                batch.append(self._waiting.popleft())
                size += batch[-1].size
        return batch

    def _wake_leader(self) -> None:
        """Wake the next leader, if there is work for it. REQUIRES: lock held."""
        if self._waiting and not self._appending and self._syncing < self._sync_limit:
            self._appending = True
            self._waiting[0]._leads = True
            self._waiting[0]._wake()


def _fail(batch: Sequence[Entry[Item]], error: BaseException) -> None:
    # This replaces an error that the append has set: it may have compared a record with
    # another one of this very batch, which is now not stored.
    for entry in batch:
        if entry._leads or isinstance(error, Exception):
            entry.error = error
        else:  # Ctrl-C, or the end of a thread, concerns the leader alone
            entry.error = StoreUnavailable('the write was interrupted')
