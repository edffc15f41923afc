"""Finding every damaged line of a plant file, and moving them out of it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from typing import NamedTuple

from store import index as id_index
from store import record
from store.base import Item
from store.base import Progress
from store.base import Verified
from store.errors import StoreUnavailable
from store.recovery import count_lines
from store.recovery import read_lines
from store.recovery import side_file
from store.recovery import sync_directory
from store.recovery import whole_size


class Damage(NamedTuple):
    """A line that is not a record, or whose id an earlier record has.

    Attributes:
        line: Counted from 1.
        offset: Where it begins, in bytes from the start of the file.
        text: Its bytes, the line feed included if it has one.
        reason: What is wrong with it.
    """

    line: int
    offset: int
    text: bytes
    reason: str


def verify(path: Path, *, move: bool, progress: Progress) -> Verified:
    """Find every damaged line of a plant file, and move them out if that is wanted."""
    count = 0

    def counted(lines: Iterable[Item]) -> Iterator[Item]:
        nonlocal count
        for count, line in enumerate(progress(lines), 1):  # noqa: B007
            yield line

    side, damaged = (
        repair(path, counted) if move else (None, find_damage(path, counted))
    )
    sentences = tuple(
        f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}'
        for damage in damaged
    )
    return Verified(count - len(damaged), sentences, str(side) if side else None)


def find_damage(path: Path, progress: Progress = iter) -> list[Damage]:
    """Return every damaged line of a plant file, in order; nothing is changed.

    Raises:
        StoreUnavailable: The file cannot be read.
    """
    try:
        with path.open('rb') as file:
            return _find_damage(file, whole_size(file), progress)
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def repair(path: Path, progress: Progress = iter) -> tuple[Path | None, list[Damage]]:
    """Move every damaged line of a plant file to a side file; nothing is lost.

    The file is replaced in one step. A server that has it open refuses plants from
    then on, until it is reloaded.

    Returns:
        The side file, if there was damage, and the damaged lines.

    Raises:
        StoreUnavailable: A file cannot be read or written, and the plant file is as it
            was; or it is repaired, but a power cut may still undo that.
    """
    path = path.resolve()  # a link stays a link
    try:
        with path.open('r+b') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            status = os.fstat(file.fileno())
            if not os.path.samestat(status, path.stat()):
                raise StoreUnavailable('it was replaced meanwhile', store=str(path))
            damaged = _find_damage(file, status.st_size, progress)
            if not damaged:
                return None, []
            side = side_file(path, 'damaged')
            _write_file(side, status, (damage.text for damage in damaged))
            offsets = {damage.offset for damage in damaged}
            repaired = side_file(path, 'repaired')
            end = status.st_size
            sound = (
                line.text
                for line in read_lines(file, 0, end)
                if line.offset not in offsets
            )
            try:
                _write_file(repaired, status, sound)
                # The point of no return: both files are durable, and so is every line.
                repaired.replace(path)
            except BaseException:
                if os.path.samestat(status, path.stat()):
                    side.unlink()  # nothing was moved
                    repaired.unlink(missing_ok=True)
                raise
            sync_directory(path)
            return side, damaged
    except OSError as ex:
        raise StoreUnavailable.refused(ex, path) from ex


def _find_damage(file: BinaryIO, end: int, progress: Progress = iter) -> list[Damage]:
    damaged = []

    def sound() -> Iterator[tuple[int, int]]:
        lines = progress(read_lines(file, 0, end))
        for number, line in enumerate(lines, 1):
            if line.plant is None:
                damaged.append(Damage(number, line.offset, line.text, line.reason))
            else:
                yield line.plant.id, line.offset

    # An index on disk finds ids that come twice without holding all ids in memory.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / 'index'
        identity = id_index.Identity(0, 0, bytes(16))
        repeated = id_index.build(path, identity, sound())
        with path.open('r+b') as index_file:
            index = id_index.Index(index_file.fileno())
            number, counted = 1, 0
            for offset, id in sorted((offset, id) for id, offset in repeated):
                first = _read_line(file, index.get(id) or 0)
                again = _read_line(file, offset)
                if record.decode(first) != record.decode(again):
                    number += count_lines(file, counted, offset)
                    counted = offset
                    reason = f'its id is that of a different plant, {id}'
                    damaged.append(Damage(number, offset, again, reason))
            index.close()
    return sorted(damaged)


def _read_line(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()


def _write_file(path: Path, like: os.stat_result, lines: Iterator[bytes]) -> None:
    """Make a durable file, with the mode and the owner of another."""
    with open(
        path, 'xb', opener=lambda name, flags: os.open(name, flags, 0o600)
    ) as new:
        try:
            os.chown(new.fileno(), like.st_uid, like.st_gid)
            os.chmod(new.fileno(), like.st_mode & 0o7777)
            new.writelines(lines)
            new.flush()
            os.fsync(new.fileno())
            sync_directory(path)
        except BaseException:
            path.unlink()
            raise
