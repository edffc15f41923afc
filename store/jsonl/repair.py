"""Finding all damage of a plant file, and making a new file of its sound lines."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import chain, groupby
from pathlib import Path
from struct import Struct
from tempfile import SpooledTemporaryFile
from typing import IO, Any, NamedTuple

from store.errors import StoreUnavailable
from store.jsonl import recovery
from store.jsonl.disk import CHUNK, copy_aside, index_path, sync_directory
from store.jsonl.index import Index
from store.jsonl.lock import take_flock
from store.jsonl.recovery import Line
from store.jsonl.table import IndexDamaged

COMPARED = 128 * 1024  # bytes of the lines that are compared at a time
NAMED = 1_000  # faults that are named; the others are counted
SPAN = Struct('qq')  # where a damaged line begins and ends

# Shows how far a file is read; yields the items that it is given.
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class Verified(NamedTuple):
    """The result of reading every plant of a store."""

    plants: int  # the number of sound lines
    # Sentences: the first damaged lines, missing bytes, an index that differs.
    damaged: tuple[str, ...] = ()
    unnamed: int = 0  # faults that have no sentence
    repaired: str = ''  # what was done about them, and what is left to do


def verify(path: Path, *, repair: bool = False, progress: Progress = iter) -> Verified:
    """Find all damage of a plant file.

    With ``repair`` damaged lines are moved to a side file, and missing bytes are
    accepted: another file with all sound lines replaces the plant file in one step. A
    server refuses plants then until it is reloaded. After an error the file is either
    unchanged or repaired; a power cut may still undo that repair.
    """
    sentences: list[str] = []
    unnamed = 0
    with (
        recovery.opened(path, os.O_RDWR if repair else os.O_RDONLY) as (fd, synced),
        SpooledTemporaryFile(CHUNK) as spans,  # perhaps of millions of lines
    ):
        if repair:
            take_flock(path, fd)
            if not os.path.samestat(os.fstat(fd), path.stat()):
                raise StoreUnavailable('it was replaced meanwhile', store=str(path))
        end = os.fstat(fd).st_size if repair else recovery.whole_size(path, fd)
        recovery.check_ours(path, fd)
        counts = Counter[str]()
        lines = progress(recovery.read_lines(fd, 0, end))
        for number, line in _find_damage(path, fd, lines, counts, locked=repair):
            spans.write(SPAN.pack(line.offset, line.end))
            if len(sentences) < NAMED:
                place = f'line {number} (byte {line.offset})'
                sentences.append(f'{path}: {place}: {line.reason}')
            else:
                unnamed += 1
        try:
            recovery.check_length(path, fd, end, synced)
        except StoreUnavailable as ex:
            sentences.append(f'{path}: {ex.reason}')
        if wrong := counts['wrong']:
            sentences.append(f'{index_path(path)}: {wrong} ids differ from the file')
        found = Verified(counts['sound'], tuple(sentences), unnamed)
        if not (repair and sentences):
            return found
        side = _replace(path, fd, end, spans)
    repaired = f'repaired: {len(sentences) + unnamed}'
    if side:
        repaired += f'; damaged lines were moved to {side}'
    if index_path(path, '-wal').exists():  # the last close removes it
        repaired += '; reload the server if it runs'
    return found._replace(repaired=repaired)


def _replace(path: Path, fd: int, end: int, spans: IO[bytes]) -> Path | None:
    """Replace a plant file by its sound lines; return the side file of the others."""
    copies: list[Path] = []
    try:
        if spans.tell():
            copies.append(copy_aside(path, fd, _read(spans), 'damaged'))
        edges = chain([0], chain.from_iterable(_read(spans)), [end])
        copies.append(copy_aside(path, fd, zip(edges, edges, strict=True), 'repaired'))
        # From here on the repair is kept: all copies, so all lines, are durable.
        os.rename(copies[-1], path)
    except BaseException:
        if os.path.samestat(os.fstat(fd), path.stat()):  # the path names the old file
            for copy in copies:
                copy.unlink()
        raise
    sync_directory(path)
    return copies[0] if len(copies) == 2 else None


def _read(spans: IO[bytes]) -> Iterator[tuple[int, int]]:
    spans.seek(0)
    while data := spans.read(SPAN.size * 1024):
        yield from SPAN.iter_unpack(data)


def _find_damage(
    path: Path, fd: int, lines: Iterable[Line], counts: Counter[str], *, locked: bool
) -> Iterator[tuple[int, Line]]:
    """Yield the damaged lines with their numbers; count sound lines and wrong ids.

    Without the lock another process may cut off a torn tail, and append. So damage
    counts only if it is still there after a cut. Lines after a cut are new: skipped.
    """
    number = 0
    with closing(Index(path, fd)) as present, closing(Index(path, fd, new=True)) as new:
        new.build(temporary=True)
        for _, group in groupby(lines, lambda line: line.offset // COMPARED):
            batch = [*group]
            ids = [(line.plant.id, line.offset) for line in batch if line.plant]
            with suppress(IndexDamaged):  # an open will build it again
                found = present.find([id for id, _ in ids])
                counts['wrong'] += sum(  # it lacks the id, or has a later line for it
                    offset < present.mark and found.get(id, offset + 1) > offset
                    for id, offset in ids
                )
            firsts = new.learn(ids)
            if not locked:
                recovery.whole_size(path, fd)  # waits for a cut that has begun
            for line in batch:
                number += 1
                first = firsts[line.plant.id] if line.plant else line.offset
                if line.plant and first != line.offset:
                    other = recovery.line_at(fd, first).plant
                    if other and other.id == line.plant.id and other != line.plant:
                        reason = recovery.REPEATED % other.id
                        line = line._replace(plant=None, reason=reason)
                if line.plant:
                    counts['sound'] += 1
                    continue
                if not locked and recovery.line_at(fd, line.offset).text != line.text:
                    return
                yield number, line
            batch.clear()
