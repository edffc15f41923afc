"""The command line: ``python -m store list|count|check|copy``.

It reads one variable of the environment, ``PLANTS_STORE``, which names the same store
here as for the server. ``store/`` may not import ``web/settings.py``, which reads all.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import NoReturn

from store import (
    DEFAULT_URL,
    IdTaken,
    Plant,
    PlantStore,
    StoreError,
    __version__,
    masked,
    open_store,
)
from store.base import Create
from store.jsonl import JSONLinesStore, record
from store.jsonl.repair import Progress, Verified, verify
from store.streams import (
    OutputClosed,
    OutputError,
    print_line,
    read_plants,
    replace_closed_streams,
    write,
)

PIPE = '-'  # the URL of the standard input

DESCRIPTION = """\
Look at stores of plants, verify them, and copy plants between them.

A URL names a store:
  plants.jsonl                     a file of JSON lines (or jsonl:PATH)
  postgresql://USER@HOST/DATABASE  a table in PostgreSQL (or postgres://...)
  memory:                          an empty store in memory, for trials
  SCHEME:...                       a store that an installed package offers
  -                                JSON lines from the standard input, for
                                   list, count and SRC of copy

The default is the environment variable PLANTS_STORE, or jsonl:plants.jsonl.
"""

EPILOG = """\
examples:
  python -m store list | jq -r .name
  python -m store check --repair plants.jsonl
  python -m store copy plants.jsonl postgresql://db.example/plants
  python -m store list postgresql://db.example/plants | gzip > plants.gz
  zcat plants.gz | python -m store copy - restored.jsonl

exit codes:
  0    done; check found no damage, copy no conflict
  1    a store is missing, damaged or unavailable, or different plants have the
       same id
  2    the command or a URL is wrong
  130  interrupted by Ctrl-C
"""

# A batch of a copy is one statement to a database, which has a time limit.
BATCH_PLANTS = 1000
BATCH_CHARACTERS = 2**20


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with a message of argparse, which may repeat a password."""
        quoted = re.sub("'([^']*)'", lambda found: repr(masked(found[1])), message)
        self.refuse(masked(quoted))

    def refuse(self, message: str) -> NoReturn:
        """Exit with a message that shows no password."""
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; return its exit code.

    Raises:
        SystemExit: The command is wrong, or asks for the help or the version.
    """
    replace_closed_streams()
    code = 1
    try:
        try:
            options = _parser().parse_args(arguments)
            code = options.run(options)
        except StoreError as ex:
            print(f'Error: {ex}', file=sys.stderr)
        except KeyboardInterrupt:
            code = 130  # as a shell reports a process that SIGINT has ended
        finally:
            with suppress(OutputClosed):
                write()  # what is still buffered
    except OutputError as ex:  # pragma: no cover - tests of it run in other processes
        print(f'Error: the output: {ex}', file=sys.stderr)
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog='python -m store',
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f'plant store {__version__}'
    parser.add_argument('--version', action='version', version=version)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')
    where = 'which store: see python -m store --help'
    default = os.environ.get('PLANTS_STORE', DEFAULT_URL)
    for run, text in (
        (_list, 'print the plants as JSON lines'),
        (_count, 'print the number of plants'),
        (_check, 'verify every plant'),
        (_copy, 'add the plants of one store to another; may be repeated'),
    ):
        command = commands.add_parser(run.__name__[1:], help=text, description=text)
        command.set_defaults(run=run, parser=command)
        if run is _copy:
            command.add_argument('url', metavar='SRC', type=_url, help=where)
            command.add_argument('target', metavar='DST', type=_url, help=where)
        else:
            command.add_argument(
                'url', metavar='URL', type=_url, nargs='?', default=default, help=where
            )
        if run is _check:
            text = 'move damaged lines to a side file'
            command.add_argument('--repair', action='store_true', help=text)
    return parser


def _url(text: str) -> str:
    """Return the URL that an argument means, which may also be a plain path."""
    has_scheme = re.match('[A-Za-z][A-Za-z0-9+.-]*:', text)
    # Text that may hold a password is no path: messages show paths as they are.
    is_path = text not in ('', PIPE) and not has_scheme and masked(text) == text
    return f'jsonl:{text}' if is_path else text


def _open(options: argparse.Namespace, url: str, create: Create) -> PlantStore:
    try:
        return open_store(url, create=create)
    except ValueError as ex:
        parser: _Parser = options.parser
        parser.refuse(str(ex))


@contextmanager
def _plants_of(options: argparse.Namespace) -> Iterator[Iterable[Plant]]:
    """Yield the plants that a command reads."""
    if options.url == PIPE:
        yield read_plants()
    else:
        with _open(options, options.url, 'never') as store:
            yield store


def _list(options: argparse.Namespace) -> int:
    with suppress(OutputClosed), _plants_of(options) as plants:
        for plant in plants:
            write(record.encode(plant), flush=False)
        write()
    return 0


def _count(options: argparse.Namespace) -> int:
    with _plants_of(options) as plants:
        print_line(str(sum(1 for _ in _progress(plants)(plants))))
    return 0


def _check(options: argparse.Namespace) -> int:
    with _open(options, options.url, 'never') as store:
        progress = _progress(store)
        if isinstance(store, JSONLinesStore):
            found = verify(store.path, repair=options.repair, progress=progress)
        elif options.repair:
            options.parser.refuse('--repair is for a file of JSON lines')
        else:  # where nothing can be damaged
            found = Verified(sum(1 for _ in progress(store)))
    for damage in found.damaged:
        print_line(damage)
    summary = f'{found.plants} plants verified, '
    if not found.damaged:
        print_line(f'{summary}no damage')
    elif found.side_file:
        moved = f'damaged lines: {len(found.damaged)}, moved to {found.side_file}'
        print_line(f'{summary}{moved}; reload the server')
    elif found.repaired:
        print_line(f'{summary}what is missing is accepted; reload the server')
    else:
        moves = '; --repair moves damaged lines to a side file, and accepts a loss'
        print_line(f'{summary}damaged: {len(found.damaged)}{moves}')
    return int(bool(found.damaged) and not found.repaired)


def _copy(options: argparse.Namespace) -> int:
    if options.target == PIPE:  # as in version 1.1.0; not in the help: list does it
        return _list(options)
    if options.url == options.target != 'memory:':
        options.parser.refuse('SRC and DST are the same store')
    with (
        _plants_of(options) as plants,
        _open(options, options.target, 'first') as target,
    ):
        return _copy_plants(_progress(plants)(plants), target)


def _copy_plants(plants: Iterable[Plant], target: PlantStore) -> int:
    """Add plants to a store, which keeps what it has."""
    bar_hidden = getattr(plants, 'external_write_mode', nullcontext)
    copied = present = conflicting = 0
    try:
        with closing(_batches(plants)) as batches:
            for batch in batches:
                outcomes = target.add_many(batch)
                copied += outcomes.count(True)
                present += outcomes.count(False)
                for plant, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, IdTaken):
                        conflicting += 1
                        with bar_hidden():
                            line = record.encode(plant).decode().strip()
                            print_line(f'conflicting: {line}')
        # A store is made at its first use, and without plants there was none.
        target.ping()
    finally:
        # Also after an error: the copied plants stay, and a repeat goes on.
        print_line(
            f'copied: {copied}, already there: {present}, conflicting: {conflicting}'
        )
    return int(conflicting > 0)


def _batches(plants: Iterable[Plant]) -> Generator[list[Plant]]:
    batch: list[Plant] = []
    size = 0
    for plant in plants:
        batch.append(plant)
        size += len(plant.name) + len(plant.tag or '')
        if len(batch) == BATCH_PLANTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _progress(source: object) -> Progress:
    """Return a progress bar, or ``iter`` without a terminal or without tqdm."""
    if not sys.stderr.isatty() or not find_spec('tqdm'):
        return iter
    from tqdm import tqdm

    total = None
    if isinstance(source, JSONLinesStore) and os.path.isfile(source.path):
        # About as many plants as if all lines were like the first ones.
        with suppress(OSError), source.path.open('rb') as file:
            sample = file.read(2**16)
            size = os.fstat(file.fileno()).st_size
            total = size * sample.count(b'\n') // max(1, len(sample)) or None
    return partial(tqdm, total=total, unit=' plants', leave=False)


if __name__ == '__main__':  # pragma: no cover
    sys.exit(main())
