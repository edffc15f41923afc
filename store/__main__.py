"""The command line: ``python -m store list|check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
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
    listing.set_defaults(run=lambda options: _list(options.url))

    checking = commands.add_parser('check', help='verify every plant')
    checking.add_argument('url', metavar='URL', type=_existing)
    checking.add_argument(
        '--repair', action='store_true', help='move damaged lines to a side file'
    )
    checking.set_defaults(run=lambda options: _check(options.url, options.repair))

    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except BrokenPipeError:  # the reader, head for example, has seen enough
        with suppress(OSError):
            sys.stdout.close()
        return 0
    except StoreError as ex:
        print(f'Error: {ex}', file=sys.stderr)
        return 1
    return code


def _store(url: str) -> str:
    try:
        open_store(url)
    except ValueError as ex:
        raise argparse.ArgumentTypeError(str(ex)) from ex
    return url


def _existing(url: str) -> str:
    path = _path(_store(url))
    if path is not None and not path.is_file():
        raise argparse.ArgumentTypeError(f'{url!r}: there is no such file')
    return url


def _path(url: str) -> Path | None:
    scheme, _, path = url.partition(':')
    return Path(path) if scheme == 'jsonl' else None


def _list(url: str) -> int:
    with open_store(url) as store:
        for plant in store:
            sys.stdout.buffer.write(record.encode(plant))
    sys.stdout.buffer.flush()
    return 0


def _check(url: str, repair: bool) -> int:
    path = _path(url)
    if path is None:
        with open_store(url) as store:
            print(f'{sum(1 for _ in store)} plants, no damage')
        return 0
    # Imported here: it needs what only a file of JSON lines needs.
    from store.repair import find_damage
    from store.repair import repair as move_out

    side, damaged = move_out(path) if repair else (None, find_damage(path))
    for damage in damaged:
        print(f'{path}: line {damage.line} (byte {damage.offset}): {damage.reason}')
    if side is not None:
        print(f'{len(damaged)} lines were moved to {side}; reload the server')
        return 0
    if damaged:
        print(f'{len(damaged)} damaged lines; --repair moves them to a side file')
        return 1
    print('no damage')
    return 0


if __name__ == '__main__':
    sys.exit(main())
