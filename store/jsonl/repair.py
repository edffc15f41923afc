"""Finding all damage of a plant file, and making a new file of its sound lines."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from store.errors import StoreUnavailable
from store.jsonl import recovery
from store.jsonl.disk import copy_aside, index_path, sync_directory
from store.jsonl.index import Index
from store.jsonl.lock import take_flock
from store.jsonl.recovery import Line
from store.jsonl.table import IndexDamaged

COMPARED = 100_000  # ids that are compared with the index at a time

# Shows how far a file is read; yields the items that it is given.
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class Verified(NamedTuple):
    """The result of reading every plant of a store."""

    plants: int  # the number of sound lines
    # A sentence for each damaged line or repeated id, for what is missing at the end,
    # and for an index that is not that of the file.
    damaged: tuple[str, ...] = ()
    repaired: str = ''  # what was done about them, and what is left to do


def verify(path: Path, *, repair: bool = False, progress: Progress = iter) -> Verified:
    """Find all damage of a plant file.

    With ``repair`` damaged lines are moved to a side file, and missing bytes are
    accepted: the plant file is replaced in one step by another file, with all sound
    lines, which gets a new index. A server that has the old one open refuses plants
    until it is reloaded. After an error the file is unchanged, or it is repaired, and a
    power cut may still undo that.
    """
    sentences: list[str] = []
    with recovery.reading(path, os.O_RDWR if repair else os.O_RDONLY) as (fd, synced):
        if repair:
            take_flock(path, fd)
            if not os.path.samestat(os.fstat(fd), path.stat()):
                raise StoreUnavailable('it was replaced meanwhile', store=str(path))
        end = os.fstat(fd).st_size if repair else recovery.whole_size(path, fd)
        recovery.check_ours(path, fd)
        plants, damaged, wrong = _find_damage(path, fd, end, progress)
        number, counted = 1, 0
        for line in damaged:
            number += recovery.count_lines(fd, counted, line.offset)
            counted = line.offset
            sentences.append(f'{path}: line {number} (byte {counted}): {line.reason}')
        try:
            recovery.check_length(path, fd, end, synced)
        except StoreUnavailable as ex:
            sentences.append(f'{path}: {ex.reason}')
        if wrong:
            sentences.append(f'{index_path(path)}: {wrong} ids differ from the file')
        if not (repair and sentences):
            return Verified(plants, tuple(sentences))
        side = _replace(path, fd, end, damaged)
    repaired = f'repaired: {len(sentences)}'
    if side:
        repaired += f'; damaged lines were moved to {side}'
    if index_path(path, '-wal').exists():  # until the last process closes the index
        repaired += '; reload the server if it runs'
    return Verified(plants, tuple(sentences), repaired)


def _replace(path: Path, fd: int, end: int, damaged: list[Line]) -> Path | None:
    """Replace a plant file by its sound lines; return the side file of the others."""
    moved = [(line.offset, line.offset + len(line.text)) for line in damaged]
    ends = [0, *(end for span in moved for end in span), end]
    copies: list[Path] = []
    try:
        if moved:
            copies.append(copy_aside(path, fd, moved, 'damaged'))
        kept = zip(ends[::2], ends[1::2], strict=True)  # what is between the spans
        copies.append(copy_aside(path, fd, kept, 'repaired'))
        # The point of no return: all copies are durable, and so is every line.
        os.rename(copies[-1], path)
    except BaseException:
        if os.path.samestat(os.fstat(fd), path.stat()):  # nothing was moved
            for copy in copies:
                copy.unlink()
        raise
    sync_directory(path)
    return copies[0] if moved else None


def _find_damage(
    path: Path, fd: int, end: int, progress: Progress
) -> tuple[int, list[Line], int]:
    """Return how many lines are sound, the others, and how many ids are wrong."""
    count = wrong = 0
    damaged: list[Line] = []
    repeated: list[tuple[int, int]] = []

    def sound() -> Iterator[tuple[int, int]]:
        nonlocal count
        for line in progress(recovery.read_lines(fd, 0, end)):
            count += 1
            if line.plant is None:
                damaged.append(line)
            else:
                yield line.plant.id, line.offset

    with closing(Index(path, fd)) as present, closing(Index(path, fd, new=True)) as new:
        new.build(temporary=True)
        lines = sound()
        while batch := list(islice(lines, COMPARED)):
            with suppress(IndexDamaged):  # an open will build it again
                found = present.find([id for id, _ in batch])
                wrong += sum(  # the index lacks the id, or has a later line for it
                    offset < present.mark and found.get(id, offset + 1) > offset
                    for id, offset in batch
                )
            firsts = new.learn(batch)
            repeated += [(firsts[id], at) for id, at in batch if firsts[id] != at]
    for first, again in repeated:
        line, plant = recovery.line_at(fd, again), recovery.line_at(fd, first).plant
        if plant is not None and line.plant != plant:
            damaged.append(line._replace(reason=recovery.REPEATED % plant.id))
    return count - len(damaged), sorted(damaged), wrong
