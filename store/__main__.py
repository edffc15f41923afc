"""The command line: ``python -m store list|check|copy``.

It reads ``PLANTS_STORE`` itself, since ``store/`` may not import ``web/settings.py``.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import NoReturn

from store import __version__
from store.base import PlantStore, batches
from store.errors import IdTaken, StoreError, StoreUnavailable
from store.jsonl import JSONLinesStore, record
from store.jsonl.repair import Progress, Verified, verify
from store.masking import escaped, is_path
from store.url import DEFAULT_URL, open_store

USAGE = """python -m store list [URL]
       python -m store check [--repair] [URL]
       python -m store copy SRC DST"""

DESCRIPTION = """\
list   print the plants of a store as JSON lines
check  verify every plant; --repair moves damaged lines of a file to a side file
copy   add the plants of one store to another, which keeps its own; may be repeated

A URL names a store, by default that of PLANTS_STORE, or jsonl:plants.jsonl:
  plants.jsonl                     a file of JSON lines (or jsonl:PATH)
  postgresql://USER@HOST/DATABASE  a table in PostgreSQL (or postgres://...)
  memory:                          an empty store in memory, for trials
  SCHEME:...                       a store that an installed package offers

exit codes: 0 done, 1 a store is missing, damaged or unavailable, or plants conflict,
            2 the command or a URL is wrong, 130 interrupted by Ctrl-C
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
    # Which table of a database is used, and how far a long opening is.
    logging.getLogger('store').setLevel(logging.INFO)
    try:
        try:
            return _run(arguments)
        except KeyboardInterrupt:
            return 130  # as a shell reports a process that SIGINT has ended
        finally:
            _print()  # what is still buffered
    except StoreError as ex:
        print(f'Error: {escaped(str(ex))}', file=sys.stderr)
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser('python -m store', USAGE, DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = partial(parser.add_argument, help=argparse.SUPPRESS)
    add('--version', action='version', version=f'plant store {__version__}')
    add('--repair', action='store_true')
    add('command', choices=('list', 'check', 'copy'))
    add('urls', nargs='*', metavar='URL')
    options = parser.parse_intermixed_args(arguments)
    urls = options.urls or [os.environ.get('PLANTS_STORE', DEFAULT_URL)]
    if len(urls) != (2 if options.command == 'copy' else 1):
        parser.error('copy needs SRC and DST, and the others at most one URL')
    if options.repair and options.command != 'check':
        parser.error('--repair belongs to check')
    try:
        # Both, so that a wrong target is found before anything is read or made.
        store, *_ = [open_store(url, create=False) for url in map(_url, urls)]
    except ValueError as ex:  # its message shows no password
        argparse.ArgumentParser.error(parser, str(ex))
    if options.repair and not isinstance(store, JSONLinesStore):
        parser.error('--repair is for a file of JSON lines')
    with store:
        if options.command == 'list':  # while somebody reads it
            all(_print(record.encode(it).decode()[:-1], flush=False) for it in store)
            return 0
        if options.command == 'check':
            return _check(store, options.repair)
        return _copy(store, _url(urls[1]))


def _url(text: str) -> str:
    """Return the URL that an argument means, which may also be a plain path."""
    # A dash was the standard output in version 1, and must not become a file.
    return f'jsonl:{text}' if is_path(text) and text != '-' else text


def _check(store: PlantStore, repair: bool) -> int:
    progress = _progress()
    if isinstance(store, JSONLinesStore):
        found = verify(store.path, repair=repair, progress=progress)
    else:  # a store without lines that can be damaged
        found = Verified(sum(1 for _ in progress(store)))
    for damage in found.damaged:
        _print(damage)
    faults = len(found.damaged) + found.unnamed
    outcome = f'damaged: {faults}; --repair moves damaged lines to a side file'
    outcome = found.repaired or (outcome if faults else 'no damage')
    _print(f'{found.plants} plants verified, {outcome}')
    return int(faults > 0 and not found.repaired)


def _copy(source: PlantStore, url: str) -> int:
    bar = _progress()(source)
    bar_hidden = getattr(bar, 'external_write_mode', nullcontext)
    counts = dict.fromkeys(('copied', 'already there', 'conflicting'), 0)
    parts = batches(bar)
    batch = next(parts, [])  # a source that cannot be read makes no target
    with open_store(url) as target:
        try:
            target.load()
            while batch:
                outcomes = target.add_many(batch)
                for plant, outcome in zip(batch, outcomes, strict=True):
                    if isinstance(outcome, IdTaken):
                        counts['conflicting'] += 1
                        with bar_hidden():
                            line = record.encode(plant).decode()[:-1]
                            _print(f'conflicting: {line}')
                    else:
                        counts['copied' if outcome else 'already there'] += 1
                batch = next(parts, [])
        finally:
            parts.close()
            # Printed after an error, too: the copied plants stay, and a repeat goes on.
            _print(', '.join(f'{name}: {count}' for name, count in counts.items()))
    return int(counts['conflicting'] > 0)


def _progress() -> Progress:
    """Return a progress bar, or ``iter`` without a terminal or without tqdm."""
    if not sys.stderr.isatty() or not find_spec('tqdm'):
        return iter
    from tqdm import tqdm

    return partial(tqdm, unit=' plants', leave=False)


def _print(line: str = '', *, flush: bool = True) -> bool:
    """Print a line, if any; return whether the standard output is still read.

    Control characters are escaped: they command a terminal. A reader may close a pipe
    early, as ``head`` does; then a copy goes on without it.
    """
    # Paths may hold bytes that are not UTF-8.
    data = f'{escaped(line)}\n'.encode(errors='surrogateescape')
    try:
        sys.stdout.buffer.write(data if line else b'')
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
