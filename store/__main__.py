"""The command line: ``python -m store list|check``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

from store import StoreError
from store import open_store
from store import record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, or 1 if a store is damaged or unavailable. A
        usage error exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog='python -m store', description='Look at stores of plants and check them.'
    )
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    listing = commands.add_parser('list', help='print the plants as JSON lines')
    listing.add_argument('url', metavar='URL', type=_existing)
    listing.set_defaults(run=lambda options: (0, _list(options.url)))

    checking = commands.add_parser('check', help='verify every plant')
    checking.add_argument('url', metavar='URL', type=_existing)
    checking.add_argument(
        '--repair', action='store_true', help='move damaged lines to a side file'
    )
    checking.set_defaults(run=lambda options: _check(options.url, options.repair))

    options = parser.parse_args(arguments)
    code = 1
    try:
        try:
            code, lines = options.run(options)
            for line in lines:
                sys.stdout.buffer.write(line)
        except StoreError as ex:
            print(f'Error: {ex}', file=sys.stderr)
            code = 1
        sys.stdout.flush()
    # Not covered: tests run what follows in processes of their own.
    except BrokenPipeError:  # pragma: no cover - the reader has seen enough
        _drop_output()
    except OSError as ex:  # pragma: no cover
        print(f'Error: the output: {ex.strerror}', file=sys.stderr)
        _drop_output()
        code = 1
    return code


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
    try:
        exists = path is None or path.is_file()
    except OSError:  # the name is too long, for example
        exists = False
    if not exists:
        raise argparse.ArgumentTypeError(f'{url!r}: there is no such file')
    return url


def _path(url: str) -> Path | None:
    scheme, _, path = url.partition(':')
    return Path(path) if scheme == 'jsonl' else None


def _list(url: str) -> Iterator[bytes]:
    with open_store(url) as store:
        for plant in store:
            yield record.encode(plant)


def _check(url: str, move: bool) -> tuple[int, list[bytes]]:
    path = _path(url)
    if path is None:
        with open_store(url) as store:
            return 0, [b'%d plants, no damage\n' % sum(1 for _ in store)]
    # Imported here: it needs what only a file of JSON lines needs.
    from store.repair import find_damage
    from store.repair import repair

    side, damaged = repair(path) if move else (None, find_damage(path))
    lines = [
        f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}'
        for damage in damaged
    ]
    if not damaged:
        lines.append('no damage')
    elif side is not None:
        lines.append(
            f'damaged lines: {len(damaged)}, moved to {side}; reload the server'
        )
    else:
        lines.append(f'damaged lines: {len(damaged)}; --repair moves them out')
    text = [f'{line}\n'.encode(errors='surrogateescape') for line in lines]
    return int(bool(damaged) and side is None), text


if __name__ == '__main__':  # pragma: no cover
    sys.exit(main())
