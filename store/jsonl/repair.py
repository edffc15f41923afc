"""Finding every damaged line of a plant file, and moving them out of it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from store.errors import StoreUnavailable
from store.jsonl import record, recovery
from store.jsonl.index import BUILD_CACHE_KIB, Draft, new_file, sync_directory
from store.jsonl.lock import take_flock

# Shows how far a file is read; yields the items that it is given.
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class Verified(NamedTuple):
    """The result of reading every plant of a store.

    Attributes:
        plants: The number of sound plants.
        damaged: A sentence for each line that is not a plant, or has the id of an
            earlier plant.
        side_file: The file that these lines were moved to, if they were moved.
    """

    plants: int
    damaged: tuple[str, ...] = ()
    side_file: str | None = None


class Damage(NamedTuple):
    """A line that is not a record, or whose id an earlier record has."""

    line: int  # counted from 1
    offset: int  # in bytes from the start of the file
    text: bytes  # the line feed included if it has one
    reason: str


def verify(
    path: Path, *, repair: bool = False, progress: Progress = iter, system: Any = os
) -> Verified:
    """Find every damaged line of a plant file.

    With ``repair`` all of them are moved to a side file; nothing is lost. The plant
    file is replaced in one step. A server that has the old one open refuses plants
    until it is reloaded.

    Raises:
        StoreUnavailable: A file cannot be read or written. The plant file is unchanged;
            or it is repaired, but a power cut may still undo the repair.
    """
    side: Path | None = None
    try:
        with path.open('r+b' if repair else 'rb') as file:
            fd = file.fileno()
            if repair:
                take_flock(path, fd, fcntl.LOCK_EX)
                if not os.path.samestat(os.fstat(fd), path.stat()):
                    raise StoreUnavailable('it was replaced meanwhile', store=str(path))
                end = os.fstat(fd).st_size
            else:
                end = recovery.whole_size(path, fd)
            lines, damaged = _find_damage(fd, end, progress)
            if repair and damaged:
                side = _move(path, fd, end, damaged, system)
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex
    sentences = tuple(
        f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}'
        for damage in damaged
    )
    return Verified(lines - len(damaged), sentences, str(side) if side else None)


def _move(path: Path, fd: int, end: int, damaged: list[Damage], system: Any) -> Path:
    """Move damaged lines to a side file, and return its path."""
    status = os.fstat(fd)
    side = recovery.side_file(path, 'damaged')
    _write_file(side, status, (damage.text for damage in damaged), system)
    offsets = {damage.offset for damage in damaged}
    repaired = recovery.side_file(path, 'repaired')
    sound = (
        line.text
        for line in recovery.read_lines(fd, 0, end)
        if line.offset not in offsets
    )
    try:
        _write_file(repaired, status, sound, system)
        # The point of no return: both files are durable, and so is every line.
        system.replace(repaired, path)
    except BaseException:
        if os.path.samestat(status, path.stat()):
            system.unlink(side)  # nothing was moved
            repaired.unlink(missing_ok=True)
        raise
    sync_directory(path, system)
    return side


def _find_damage(fd: int, end: int, progress: Progress) -> tuple[int, list[Damage]]:
    """Return the number of all lines, and the damaged lines in order."""
    count = 0
    damaged = []
    repeated = []

    def sound() -> Iterator[tuple[int, int]]:
        nonlocal count
        lines = progress(recovery.read_lines(fd, 0, end))
        for count, line in enumerate(lines, 1):
            if line.plant is None:
                damaged.append(Damage(count, line.offset, line.text, line.reason))
            else:
                yield line.plant.id, line.offset

    # An index on disk finds repeated ids without holding all ids in memory.
    with (
        tempfile.TemporaryDirectory() as directory,
        Draft(Path(directory) / 'index', os.fstat(fd), 0, BUILD_CACHE_KIB) as draft,
    ):
        draft.extend(sound(), lambda *offsets: repeated.append(offsets))
    number, counted = 1, 0
    for again, first in sorted((again, first) for first, again in repeated):
        plant = record.decode(recovery.read_line(fd, first))
        line = recovery.read_line(fd, again)
        if record.decode(line) != plant:
            number += recovery.count_lines(fd, counted, again)
            counted = again
            reason = f'its id is that of a different plant, {plant.id}'
            damaged.append(Damage(number, again, line, reason))
    return count, sorted(damaged)


def _write_file(
    path: Path, like: os.stat_result, lines: Iterable[bytes], system: Any
) -> None:
    """Make a durable file with the mode and the owner of another file."""
    fd = new_file(path, like, system)
    try:
        with open(fd, 'wb', closefd=False) as new:
            new.writelines(lines)
        system.fsync(fd)
        sync_directory(path, system)
    except BaseException:
        system.unlink(path)
        raise
    finally:
        os.close(fd)
