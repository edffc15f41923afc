"""The embedded store: a file of JSON lines, shared by any number of processes."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from store.base import Plant
from store.committer import CommittedStore
from store.jsonl import disk, record, recovery
from store.jsonl.file import PlantFile
from store.jsonl.known import Known
from store.scheduler import THREADS, Scheduler

log = logging.getLogger(__name__)


class JSONLinesStore(CommittedStore):
    """Keep plants in a file of JSON lines; an add returns after ``fdatasync``.

    A new file has mode 0600. A line that is there twice is accepted, and yielded twice.
    Links to ``path`` are followed. With ``create`` a missing file is made now, or
    ``StoreUnavailable`` raised; later none is ever made.
    """

    def __init__(
        self, path: str | Path, *, create: bool = True, scheduler: Scheduler = THREADS
    ) -> None:
        # Resolved, so that all processes lock one file, even if links lead to it.
        # NOTE: not Path.resolve(), which raises RuntimeError where links make a loop.
        self.path = Path(os.path.realpath(path))
        super().__init__(str(self.path), scheduler=scheduler)
        if create:
            with disk.Refusing(self.path):
                disk.make_file(self.path)
        self._known = Known(Path(path).absolute())  # by its name: links may change

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        with recovery.opened(self.path) as fd:
            yield from recovery.read_plants(self.path, fd)

    def _record(self, plant: Plant) -> tuple[tuple[Plant, bytes], int]:
        line = record.encode(plant)
        return (plant, line), len(line)

    def _open_backend(self, within: float | None = None) -> PlantFile:
        return PlantFile(self.path, self._known.child(), within)

    def load(self) -> None:
        # NOTE: in the thread of the caller. The memory of another thread would be used
        # again by the committers of children, so they would share 3 MiB less of it. If
        # the caller is interrupted, what is left is what a crash leaves.
        self._check_open()
        with closing(self._open_backend(math.inf)) as file:
            file.ping()
        self._known = file.known  # for forked children
        log.info('%s: it has %d plants', self.path, len(file.known.plants))
