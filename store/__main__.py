"""The command line: ``python -m store list|count|check|copy``.

It reads ``PLANTS_STORE`` itself, since ``store/`` may not import ``web/settings.py``.
"""

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import NoReturn

from store import __version__
from store.base import Plant, PlantStore, batches
from store.errors import IdTaken, StoreError, StoreUnavailable
from store.jsonl import JSONLinesStore, record
from store.jsonl.repair import Progress, Verified, verify
from store.masking import escaped, is_path
from store.url import DEFAULT_URL, open_store

PIPE = '-'  # the URL of the standard input
RETRY_AFTER = 1.0  # seconds, while a copy waits for a store
WAIT = 60  # seconds that it waits at most, by default

DESCRIPTION = """\
List, count and verify the plants of stores, and copy them between stores.

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

exit codes: 0 done, 1 a store is missing, damaged or unavailable, or plants
conflict, 2 the command or a URL is wrong, 130 interrupted by Ctrl-C
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with a message of argparse, cut before the argument that it repeats."""
        repeated = '(?s)^(unrecognized arguments|ambiguous option).*|[:]? ?[\'"].*'
        super().error(re.sub(repeated, r'\1', message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; return its exit code."""
    for name in 'stdout', 'stderr':
        if getattr(sys, name) is None:  # closed: print() would write to stdout
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w'))
    logging.basicConfig(format='%(message)s')
    # Shows which table of a database is used.
    logging.getLogger('store.postgresql').setLevel(logging.INFO)
    try:
        try:
            options = _parser().parse_args(arguments)
            code: int = options.run(options)
        except KeyboardInterrupt:
            code = 130  # as a shell reports a process that SIGINT has ended
        finally:
            _write()  # what is still buffered
    except StoreError as ex:
        print(f'Error: {escaped(str(ex))}', file=sys.stderr)
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog='python -m store', description=DESCRIPTION, epilog=EPILOG)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
        add_url = partial(command.add_argument, type=_url, help=where)
        if run is _copy:
            add_url('url', metavar='SRC')
            add_url('target', metavar='DST')
            text = f'seconds to wait if a store becomes unavailable (default: {WAIT})'
            command.add_argument('--wait', type=int, default=WAIT, help=text)
        else:
            add_url('url', metavar='URL', nargs='?', default=default)
        if run is _check:
            text = 'move damaged lines to a side file'
            command.add_argument('--repair', action='store_true', help=text)
    return parser


def _url(text: str) -> str:
    """Return the URL that an argument means, which may also be a plain path."""
    has_scheme = re.match('[A-Za-z][A-Za-z0-9+.-]*:', text)
    is_file = text != PIPE and not has_scheme and is_path(text)
    return f'jsonl:{text}' if is_file else text


def _open(options: argparse.Namespace, url: str, create: bool) -> PlantStore:
    try:
        return open_store(url, create=create)
    except ValueError as ex:  # its message shows no password
        argparse.ArgumentParser.error(options.parser, str(ex))


def _source(options: argparse.Namespace) -> AbstractContextManager[Iterable[Plant]]:
    """Return the plants that a command reads; a ``with`` block closes their store."""
    if options.url == PIPE:
        return nullcontext(_read_plants())
    return _open(options, options.url, False)


def _list(options: argparse.Namespace) -> int:
    with _source(options) as plants:
        for plant in plants:
            if not _write(_record(plant), flush=False):
                break
    return 0


def _count(options: argparse.Namespace) -> int:
    with _source(options) as plants:
        _print_line(str(sum(1 for _ in _progress(plants)(plants))))
    return 0


def _check(options: argparse.Namespace) -> int:
    with _open(options, options.url, False) as store:
        progress = _progress(store)
        if isinstance(store, JSONLinesStore):
            found = verify(store.path, repair=options.repair, progress=progress)
        elif options.repair:
            options.parser.error('--repair is for a file of JSON lines')
        else:  # a store without lines that can be damaged
            found = Verified(sum(1 for _ in progress(store)))
    for damage in found.damaged:
        _print_line(damage)
    if found.unnamed:
        _print_line(f'... and {found.unnamed} more')
    outcome = found.repaired or 'no damage'
    if is_damaged := bool(found.damaged and not found.repaired):
        faults = len(found.damaged) + found.unnamed
        moves = '--repair moves damaged lines to a side file, and accepts a loss'
        outcome = f'damaged: {faults}; {moves}'
    _print_line(f'{found.plants} plants verified, {outcome}')
    return int(is_damaged)


def _copy(options: argparse.Namespace) -> int:
    if options.target == PIPE:  # kept from 1.1.0; not in the help: use list
        return _list(options)
    if options.url == options.target != 'memory:':
        options.parser.error('SRC and DST are the same store')
    with _source(options) as plants, _open(options, options.target, True) as target:
        return _copy_plants(plants, target, options.wait)


def _copy_plants(source: Iterable[Plant], target: PlantStore, wait: int) -> int:
    """Add plants to a store, which keeps what it has.

    A store that has worked may fail for ``wait`` seconds. A lost batch is added again.
    A lost source is read again from its start: its first plants are then there already.
    """
    bar = _progress(source)(source)
    bar_hidden = getattr(bar, 'external_write_mode', nullcontext)
    parts, batch = batches(bar), list[Plant]()
    counts = dict.fromkeys(('copied', 'already there', 'conflicting'), 0)
    furthest, lost_at = 0, 0.0
    try:
        while True:
            try:
                if not (batch := batch or next(parts, [])):
                    break
                outcomes = target.add_many(batch)
            except StoreUnavailable as ex:
                lost_at = lost_at or time.monotonic()
                if not furthest or time.monotonic() >= lost_at + wait:
                    raise
                with bar_hidden():
                    print(f'Waiting: {escaped(str(ex))}', file=sys.stderr)
                time.sleep(RETRY_AFTER)
                if not batch:
                    parts, counts = batches(source), dict.fromkeys(counts, 0)
                continue
            for plant, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, IdTaken):
                    counts['conflicting'] += 1
                    with bar_hidden():
                        _write(b'conflicting: ' + _record(plant))
                else:
                    counts['copied' if outcome else 'already there'] += 1
            batch = []
            # A source that fails at the same place each time is not read for ever.
            if (done := sum(counts.values())) > furthest:
                furthest, lost_at = done, 0.0
        if not furthest:  # no plant came, so the store was not used and not made
            target.add_many([])  # opens it, however long that takes
            target.ping()
    finally:
        parts.close()
        # Printed after an error, too: the copied plants stay, and a repeat goes on.
        _print_line(', '.join(f'{name}: {count}' for name, count in counts.items()))
    return int(counts['conflicting'] > 0)


def _progress(source: object) -> Progress:
    """Return a progress bar, or ``iter`` without a terminal or without tqdm."""
    if not sys.stderr.isatty() or not find_spec('tqdm'):
        return iter
    from tqdm import tqdm

    total = None
    if isinstance(source, JSONLinesStore) and source.path.is_file():
        # An estimate, as if all lines were as long as the first ones.
        with suppress(OSError), source.path.open('rb') as file:
            lines, size = file.read(2**16), source.path.stat().st_size
            total = size * lines.count(b'\n') // max(1, len(lines))
    return partial(tqdm, total=total, unit=' plants', leave=False)


def _read_plants() -> Iterator[Plant]:
    """Yield the plants of the standard input; raise ``StoreError`` for any other line.

    After ``StoreUnavailable`` a copy would wait, find no more, and report success.
    """
    name, number = 'the standard input', 0
    if sys.stdin is None:
        raise StoreError(f'{name} is closed')
    try:
        while line := sys.stdin.buffer.readline(record.LONGEST + 2):
            number += 1
            yield record.decode(line)
    except record.DamagedRecord as ex:
        raise StoreError(f'{name}: line {number} is no plant: {ex}') from ex
    except OSError as ex:
        raise StoreError(f'{name}: {ex.strerror}') from ex


def _record(plant: Plant) -> bytes:
    """Return the record of a plant, with escapes for what controls a terminal."""
    return escaped(record.encode(plant)[:-1].decode()).encode() + b'\n'


def _print_line(line: str) -> None:
    # Paths may hold bytes that are not UTF-8.
    _write(f'{escaped(line)}\n'.encode(errors='surrogateescape'))


def _write(data: bytes = b'', *, flush: bool = True) -> bool:
    """Write to the standard output; return whether the output is still read.

    A reader may close a pipe early, as ``head`` does; then a copy goes on without it.
    """
    try:
        sys.stdout.buffer.write(data)
        if flush:
            sys.stdout.flush()
    except OSError as ex:
        # The rest goes nowhere: at its exit the interpreter would fail to flush it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(ex, BrokenPipeError):
            raise StoreUnavailable.refused(ex, 'the output') from ex
        return False
    return True


if __name__ == '__main__':  # pragma: no cover
    sys.exit(main())
