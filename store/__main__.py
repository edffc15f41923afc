"""The command line: ``python -m store list|check|copy``."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import NoReturn

from store import IdTaken
from store import Plant
from store import PlantStore
from store import StoreError
from store import open_store
from store.jsonl import record

if TYPE_CHECKING:
    from tqdm import tqdm

# One statement to a database, which has a deadline.
COPIED_AT_ONCE = 1000  # plants
TEXT_AT_ONCE = 2**20  # characters
INTERRUPTED = 130  # what a shell makes of a process that SIGINT has ended

# As it may be in a complaint of argparse, which repeats what it did not expect.
_SECRET = re.compile(r'(?<=//)(?!\.\.\.@).*(?=@)|(?<=password=)(?!\.\.\.).*', re.DOTALL)


class _Parser(argparse.ArgumentParser):
    """A parser that shows nobody's password."""

    def error(self, message: str) -> NoReturn:
        super().error(_SECRET.sub('...', message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, or 1 if a store is damaged or unavailable, or two plants are
        in each other's way; 130 after Ctrl-C. A usage error exits with 2.
    """
    parser = _Parser(
        prog='python -m store',
        description='Look at stores of plants, check them, and move between them.',
    )
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    listing = commands.add_parser('list', help='print the plants as JSON lines')
    listing.add_argument('url', metavar='URL', type=_existing)
    listing.set_defaults(run=lambda options: _list(options.url))

    checking = commands.add_parser('check', help='verify every plant')
    checking.add_argument('url', metavar='URL', type=_existing)
    checking.add_argument(
        '--repair', action='store_true', help='move damaged lines to a side file'
    )
    checking.set_defaults(run=lambda options: _check(options.url, options.repair))

    copying = commands.add_parser(
        'copy', help='add the plants of one store to another; repeat it at will'
    )
    copying.add_argument('source', metavar='SRC', type=_existing)
    copying.add_argument('target', metavar='DST', type=_store)
    copying.set_defaults(run=lambda options: _copy(options.source, options.target))

    options = parser.parse_args(arguments)
    if vars(options).get('repair') and _path(options.url) is None:
        checking.error('--repair is for a file of JSON lines')
    if 'target' in options and _is_same(options.source, options.target):
        copying.error('SRC and DST are the same store')
    code = 1
    try:
        try:
            code = options.run(options)
        except StoreError as ex:
            _complain(str(ex))
        except KeyboardInterrupt:
            code = INTERRUPTED
        with _reader_may_leave():
            sys.stdout.flush()
    # Not covered: tests run what follows in processes of their own.
    except OSError as ex:  # pragma: no cover
        _complain(f'the output: {ex.strerror}')
        _drop_output()
        code = 1
    return code


def _print(line: str) -> None:
    with _reader_may_leave():
        sys.stdout.buffer.write(f'{line}\n'.encode(errors='surrogateescape'))


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # pragma: no cover - the reader has seen enough
        _drop_output()


def _complain(sentence: str) -> None:
    print(f'Error: {sentence}', file=sys.stderr)


def _drop_output() -> None:  # pragma: no cover
    """Keep the interpreter from trying once more, and complaining, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _store(url: str) -> str:
    try:
        open_store(url)
    except ValueError as ex:
        raise argparse.ArgumentTypeError(str(ex)) from ex
    return url


def _existing(url: str) -> str:
    path = _path(_store(url))
    # NOTE: not Path.is_file(), which raises for a name that is too long.
    if path is not None and not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f'{url!r}: there is no such file')
    return url


def _path(url: str) -> Path | None:
    scheme, _, path = url.partition(':')
    return Path(path) if scheme == 'jsonl' else None


def _is_same(url: str, other: str) -> bool:
    path, other_path = _path(url), _path(other)
    if path is None or other_path is None:
        return url == other != 'memory:'
    return os.path.exists(other_path) and path.samefile(other_path)


def _list(url: str) -> int:
    with _reader_may_leave(), open_store(url, create='never') as store:
        for plant in store:
            sys.stdout.buffer.write(record.encode(plant))
    return 0


def _check(url: str, move: bool) -> int:
    path = _path(url)
    if path is None:
        with open_store(url, create='never') as store:
            _print(f'{sum(1 for _ in store)} plants, no damage')
        return 0
    # Imported here: it needs what only a file of JSON lines needs.
    from store.jsonl.repair import find_damage
    from store.jsonl.repair import repair

    side, damaged = repair(path) if move else (None, find_damage(path))
    for damage in damaged:
        _print(f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}')
    if not damaged:
        _print('no damage')
    elif side is not None:
        _print(f'damaged lines: {len(damaged)}, moved to {side}; reload the server')
    else:
        _print(f'damaged lines: {len(damaged)}; --repair moves them out')
    return int(bool(damaged) and side is None)


def _copy(source_url: str, target_url: str) -> int:
    """Add all plants of a store to another, which keeps what it has."""
    copied = present = conflicting = 0
    try:
        with (
            open_store(source_url, create='never') as source,
            open_store(target_url) as target,
            _progress(source) as plants,
            _held_back(signal.SIGINT) as interrupts,
        ):
            for batch in _batches(plants):
                if interrupts:
                    raise KeyboardInterrupt
                outcomes = target.add_many(batch)
                copied += outcomes.count(True)
                present += outcomes.count(False)
                taken = [
                    plant
                    for plant, outcome in zip(batch, outcomes, strict=True)
                    if isinstance(outcome, IdTaken)
                ]
                if taken:
                    conflicting += len(taken)
                    with plants.external_write_mode():
                        _print_conflicting(taken)
            # It was not used yet if there are no plants, and so is not made either.
            target.ping()
    finally:
        # Also when it breaks off: what was copied stays, and a repeat goes on.
        _print(
            f'copied: {copied}, already there: {present}, conflicting: {conflicting}'
        )
    return int(conflicting > 0)


@contextmanager
def _held_back(number: int) -> Iterator[list[int]]:
    """Note a signal, once, in the place of what it does: it may come inside a lock."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, before)

    before = signal.signal(number, note)
    try:
        yield noted
    finally:
        signal.signal(number, before)


def _batches(plants: Iterable[Plant]) -> Iterator[list[Plant]]:
    batch: list[Plant] = []
    size = 0
    for plant in plants:
        batch.append(plant)
        size += len(plant.name) + len(plant.tag or '')
        if len(batch) == COPIED_AT_ONCE or size >= TEXT_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _print_conflicting(plants: Iterable[Plant]) -> None:
    for plant in plants:
        _print(f'conflicting: {record.encode(plant).decode().strip()}')
    with _reader_may_leave():
        sys.stdout.flush()


def _progress(store: PlantStore) -> tqdm[Plant]:
    """Show a bar while a store is read, if somebody looks at a terminal."""
    from tqdm import tqdm

    nobody = not sys.stderr.isatty()
    total = None if nobody else store.size_hint() or None
    return tqdm(store, total=total, disable=nobody, unit=' plants', leave=False)


if __name__ == '__main__':  # pragma: no cover
    sys.exit(main())
