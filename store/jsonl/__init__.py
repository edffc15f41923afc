"""The embedded store: a file of JSON lines, shared by any number of processes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from store.base import Create, Plant
from store.errors import StoreUnavailable
from store.jsonl import record, recovery
from store.jsonl.disk import open_or_make, unavailable
from store.jsonl.file import PlantFile
from store.lazy import LazyStore
from store.scheduler import THREADS, Scheduler


class JSONLinesStore(LazyStore[PlantFile]):
    """Keep plants in a file of JSON lines; durable when the disk says so.

    An add returns after ``fdatasync``. A new file has mode 0600. A line that is in the
    file twice is accepted, and yielded twice.

    Args:
        path: The plant file. The index is beside it, with ``.index`` added.
        create: Whether a missing file is made: ``always``, now; ``never``; or
            ``first``, at the first use and only if its index is missing too. With
            ``always`` and ``never`` the store accepts only the file that is there now.
        scheduler: How the callers wait.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: Create = 'first',
        scheduler: Scheduler = THREADS,
    ) -> None:
        # Resolved, so that a file has one index, even if symbolic links lead to it.
        # NOTE: not Path.resolve(), which raises RuntimeError where links make a loop.
        self.path = Path(os.path.realpath(path))
        super().__init__(str(self.path), scheduler=scheduler)
        self._create = create
        self._pinned: os.stat_result | None = None
        if create == 'always':
            with unavailable(self.path):
                os.close(open_or_make(self.path, create))
        if create != 'first':
            with suppress(OSError):
                self._pinned = self.path.stat()

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        return recovery.read_plants(self.path)

    def check_opening(self) -> None:
        self._check_open()
        with unavailable(self.path):
            # The index is made in this directory.
            if not os.access(self.path.parent, os.W_OK | os.X_OK, effective_ids=True):
                reason = 'its directory does not exist, or cannot be written to'
                raise StoreUnavailable(reason, store=str(self.path))
            with suppress(FileNotFoundError):
                recovery.check_opening(self.path)

    def _open_backend(self) -> PlantFile:
        create = 'never' if self._pinned else self._create
        return PlantFile(self.path, create, pinned=self._pinned)

    def _record(self, plant: Plant) -> tuple[tuple[Plant, bytes], int]:
        line = record.encode(plant)
        return (plant, line), len(line)
