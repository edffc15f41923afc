"""Finding every damage of a plant file, and making another file of what is sound."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from store.errors import StoreUnavailable
from store.jsonl import record, recovery
from store.jsonl.disk import copy_aside, index_path, open_file, sync_directory
from store.jsonl.index import Index
from store.jsonl.lock import take_flock
from store.jsonl.synced import read_synced
from store.jsonl.table import IndexDamaged

COMPARED = 10_000  # ids that are compared with the index at a time

# Shows how far a file is read; yields the items that it is given.
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class Verified(NamedTuple):
    """The result of reading every plant of a store.

    Attributes:
        plants: The number of sound plants.
        damaged: A sentence for each line that is not a plant, or has the id of an
            earlier plant, and for what is missing at the end.
        side_file: The file that damaged lines were moved to, if there were any.
        repaired: Whether the damage was repaired.
    """

    plants: int
    damaged: tuple[str, ...] = ()
    side_file: str | None = None
    repaired: bool = False


class Damage(NamedTuple):
    """A line that is not a record, or whose id an earlier record has."""

    line: int  # counted from 1
    offset: int  # in bytes from the start of the file
    text: bytes  # the line feed included if it has one
    reason: str


def check_opening(path: Path) -> None:
    """Raise what an open of a plant file would raise; change nothing.

    Raises:
        StoreUnavailable: It is too short, no file of plants, or it cannot be read.
        StoreCorrupt: A line that an open would read is damaged.
    """
    fd = open_file(path)
    with closing(Index(path, fd)) as index:
        try:
            end = recovery.whole_size(path, fd)
            synced = max(index.synced, read_synced(path, fd))
            recovery.check_length(path, fd, end, synced)
            lines = recovery.scan_ids(path, fd, index.end, end, synced, crashed=True)
            repeat = partial(recovery.check_repeat, path, fd)
            # An open cuts off a torn tail, and builds an index that it cannot read.
            with suppress(recovery.TornTail, IndexDamaged):
                if index.reason:
                    index.build(lines, repeat, temporary=True)
                else:
                    index.learn(lines, repeat)
        finally:
            os.close(fd)


def verify(path: Path, *, repair: bool = False, progress: Progress = iter) -> Verified:
    """Find every damage of a plant file.

    With ``repair`` damaged lines are moved to a side file, and missing bytes are
    accepted: the plant file is replaced in one step by another file, with all sound
    lines. A server that has the old one open refuses plants until it is reloaded.

    Raises:
        StoreUnavailable: A file cannot be read or written. The plant file is unchanged;
            or it is repaired, but a power cut may still undo the repair.
    """
    side: Path | None = None
    try:
        fd = open_file(path, os.O_RDWR if repair else os.O_RDONLY)
        try:
            if repair:
                take_flock(path, fd, fcntl.LOCK_EX)
                if not os.path.samestat(os.fstat(fd), path.stat()):
                    raise StoreUnavailable('it was replaced meanwhile', store=str(path))
                end = os.fstat(fd).st_size
            else:
                end = recovery.whole_size(path, fd)
            missing = max(0, recovery.known_end(path, fd) - end)
            lines, damaged, wrong = _find_damage(path, fd, end, progress)
            if repair and (damaged or missing or wrong):
                side = _replace(path, fd, end, damaged)
        finally:
            os.close(fd)
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex
    sentences = [
        f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}'
        for damage in damaged
    ]
    if missing:
        sentences.append(f'{path}: {recovery.cut_short(missing)}')
    if wrong:
        sentences.append(f'{index_path(path)}: {wrong} ids differ from the file')
    return Verified(
        lines - len(damaged),
        tuple(sentences),
        str(side) if side else None,
        repaired=repair and bool(sentences),
    )


def _replace(path: Path, fd: int, end: int, damaged: list[Damage]) -> Path | None:
    """Replace a plant file by its sound lines; return the side file of the others."""
    status = os.fstat(fd)
    moved = [(damage.offset, damage.offset + len(damage.text)) for damage in damaged]
    side = copy_aside(path, fd, moved, 'damaged') if moved else None
    starts = [0, *(stop for _, stop in moved)]
    stops = [*(start for start, _ in moved), end]
    repaired: Path | None = None
    try:
        kept = zip(starts, stops, strict=True)
        repaired = copy_aside(path, fd, kept, 'repaired')
        # The point of no return: both files are durable, and so is every line.
        os.replace(repaired, path)
    except BaseException:
        if os.path.samestat(status, path.stat()):  # nothing was moved
            for copy in filter(None, (repaired, side)):
                copy.unlink()
        raise
    sync_directory(path)
    return side


def _find_damage(
    path: Path, fd: int, end: int, progress: Progress
) -> tuple[int, list[Damage], int]:
    """Return the number of lines, the damaged ones, and that of wrong ids in the index.

    A table on disk finds repeated ids without holding all ids in memory.
    """
    count = wrong = 0
    damaged: list[Damage] = []
    repeated: list[tuple[int, int]] = []
    entries: dict[int, int] = {}

    def sound() -> Iterator[tuple[int, int]]:
        nonlocal count, wrong
        lines = progress(recovery.read_lines(fd, 0, end))
        for count, line in enumerate(lines, 1):
            if line.plant is None:
                damaged.append(Damage(count, line.offset, line.text, line.reason))
            else:
                entries.setdefault(line.plant.id, line.offset)
                if len(entries) == COMPARED:
                    wrong += _count_wrong(present, entries)
                    entries.clear()
                yield line.plant.id, line.offset
        wrong += _count_wrong(present, entries)

    with (
        closing(Index(path, fd)) as present,
        closing(Index(path, fd, new=True)) as new,
    ):
        new.build(
            sound(),
            lambda first, again: repeated.append((again, first)),
            temporary=True,
        )
    number, counted = 1, 0
    for again, first in sorted(repeated):
        plant = record.decode(recovery.read_line(fd, first))
        line = recovery.read_line(fd, again)
        if record.decode(line) != plant:
            number += recovery.count_lines(fd, counted, again)
            counted = again
            reason = recovery.repeated(plant.id)
            damaged.append(Damage(number, again, line, reason))
    return count, sorted(damaged), wrong


def _count_wrong(index: Index, entries: dict[int, int]) -> int:
    """Return how many ids an index does not find at their offset, or before it."""
    try:
        found = index.find(entries)
    except IndexDamaged:  # an open will build it again
        return 0
    return sum(
        offset < index.mark and found.get(id, offset + 1) > offset
        for id, offset in entries.items()
    )
