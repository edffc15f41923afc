"""Finding all damage of a plant file, and blanking its damaged lines."""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from store.jsonl import disk, lock, recovery
from store.jsonl.index import Index
from store.jsonl.known import REPEATED, Known
from store.jsonl.lines import first_offset, line_at, read_lines

log = logging.getLogger(__name__)

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
        if first_offset(fd):
            log.warning('%s: it begins with a byte order mark, which is skipped', path)
        end = recovery.whole_size(path, fd)
        if repair:
            lock.take(path, fd)  # until the file is closed
            end = Known(path, fd, memoryview(bytes(8)).cast('q')).check(fd)
        for number, line in enumerate(progress(read_lines(fd, 0, end)), 1):
            reason = line.reason
            if line.plant:
                for id, first, _ in index.enter([line.plant.id], [line.offset]):
                    if line_at(fd, first).plant != line.plant:
                        reason = REPEATED % id
            if not reason:
                plants += line.plant is not None  # or it is blank
                continue
            if not repair:
                # Another process may cut off a torn tail, and append. So damage counts
                # only if it is still there after that; what follows is new.
                recovery.whole_size(path, fd)  # waits for a cut that has begun
                if line_at(fd, line.offset).text != line.text:
                    break
            if not faults and not recovery.is_torn(line, end):
                recovery.check_ours(path, fd, line)
            faults += 1
            if faults <= NAMED:
                place = f'line {number} (byte {line.offset})'
                sentences.append(f'{path}: {place}: {reason}')
            # Neighbours are one span: there may be millions of them.
            is_next = spans and spans[-1][1] == line.offset
            start, _ = spans.pop() if is_next else (line.offset, line.end)
            spans.append((start, line.end))
        found = Verified(plants, tuple(sentences), faults - len(sentences))
        if not (repair and spans):
            return found
        side = recovery.blank(path, fd, spans, 'damaged', partial(disk.sync, fd))
    done = f'repaired: {faults}; damaged lines were moved to {side}; reload a server'
    return found._replace(repaired=done)
