"""Finding all damage of a plant file, and blanking its damaged lines."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from store.jsonl import disk, recovery
from store.jsonl.index import Index
from store.jsonl.known import REPEATED, Known
from store.jsonl.record import first_offset, line_at, read_lines

NAMED = 1_000  # faults that are named; the others are counted

Progress = Callable[[Iterable[Any]], Iterable[Any]]  # yields the items that it gets


class Verified(NamedTuple):
    """The result of reading every plant of a store."""

    plants: int  # the number of sound lines
    damaged: tuple[str, ...] = ()  # a sentence for each of the first damaged lines
    unnamed: int = 0  # damaged lines that have no sentence
    repaired: str = ''  # what was done about them


def verify(path: Path, *, repair: bool = False, progress: Progress = iter) -> Verified:
    """Find all damage of a plant file.

    With ``repair`` damaged lines are copied to a side file and blanked in place, under
    the lock, so servers wait. If that is interrupted, the same call mends the rest.
    """
    index = Index()
    sentences: list[str] = []
    spans: list[tuple[int, int]] = []
    plants = faults = 0
    with recovery.opened(path, os.O_RDWR if repair else os.O_RDONLY) as fd:
        lines = recovery.settled_lines(path, fd)
        if repair:
            disk.take_lock(path, fd)  # until the file is closed
            known = Known(path)
            known.check_same(os.fstat(fd))
            lines = read_lines(fd, 0, known.check(fd).st_size)
        for number, line in enumerate(progress(lines), 1):
            reason = line.reason
            if line.plant:
                for id, first, _ in index.enter([(line.plant.id, line.offset)]):
                    if line_at(fd, first).plant != line.plant:
                        reason = REPEATED % id
            if not reason:
                plants += line.plant is not None  # or it is blank
                continue
            faults += 1
            if faults <= NAMED:
                place = f'line {number} (byte {line.offset})'
                sentences.append(f'{path}: {place}: {reason}')
            # Neighbours are one span: there may be millions of them.
            is_next = spans and spans[-1][1] == line.offset
            begin, _ = spans.pop() if is_next else (line.offset, line.end)
            spans.append((begin, line.end))
        is_array = os.pread(fd, 1, first_offset(fd)) == b'['
        if faults and (is_array or not plants):
            raise OSError('it is not a file of plants')
        found = Verified(plants, tuple(sentences), faults - len(sentences))
        if not (repair and spans):
            return found
        side = recovery.blank(path, fd, spans, 'damaged', partial(disk.sync, fd))
    done = f'repaired: {faults}; damaged lines were moved to {side}; reload a server'
    return found._replace(repaired=done)
