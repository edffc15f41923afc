"""The command line. It reads ``PLANTS_STORE``, since ``store/`` imports no ``web/``."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from io import TextIOWrapper
from itertools import chain

from store import __version__
from store.base import Plant, PlantStore, batches
from store.errors import StoreError, StoreUnavailable
from store.jsonl import JSONLinesStore, record
from store.jsonl.repair import Progress, Verified, verify
from store.masking import escaped, is_path
from store.url import DEFAULT_URL, open_store

HELP = f"""\
plant store {__version__}
usage: python -m store list [URL]            print plants as JSON lines
       python -m store check [URL]           verify every plant
       python -m store check --repair [URL]  move damaged lines to a side file
       python -m store copy SRC DST          add plants to DST; may be repeated

A URL names a store, by default that of PLANTS_STORE, or jsonl:plants.jsonl:
  plants.jsonl                     a file of JSON lines (or jsonl:PATH)
  postgresql://USER@HOST/DATABASE  a table in PostgreSQL (or postgres://...)
  memory:                          an empty store in memory, for trials
  SCHEME:...                       a store that an installed package offers"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of this process; return its exit code."""
    for name in 'stdout', 'stderr':
        if getattr(sys, name) is None:  # closed: print() would write to stdout
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w'))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8')
    logging.basicConfig(format='%(message)s')
    logging.getLogger('store.jsonl.known').setLevel('INFO')  # how far an opening is
    code = 1
    try:
        try:
            return _run(*sys.argv[1:] if arguments is None else arguments)
        except KeyboardInterrupt:
            return 130  # as a shell reports a process that SIGINT has ended
        finally:
            sys.stdout.flush()
    except ValueError as ex:  # of a URL, or of a command; it shows no password
        code, reason = 2, f'{ex} (see python -m store --help)'
    except StoreError as ex:
        reason = escaped(str(ex))
    except OSError as ex:  # of the output: a store raises no such error
        # The rest goes nowhere: at its exit the interpreter would fail to flush it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(ex, BrokenPipeError):
            return 141  # as for SIGPIPE; the reader has read enough, as head has
        reason = f'the output: {ex.strerror}'
    print(f'Error: {reason}', file=sys.stderr)
    return code


def _run(command: str = '', *arguments: str) -> int:
    if {'-h', '--help', '--version'} & {command, *arguments}:
        print(HELP)
        return 0
    repair = '--repair' in arguments
    urls = [it for it in arguments if it != '--repair']
    urls = urls or [os.environ.get('PLANTS_STORE', DEFAULT_URL)]
    is_option = any(url.startswith('-') for url in urls)
    if is_option or {'list': 1, 'check': 1, 'copy': 2}.get(command) != len(urls):
        raise ValueError('use list [URL], check [--repair] [URL], or copy SRC DST')
    urls = [f'jsonl:{url}' if is_path(url) else url for url in urls]
    # Both, so that a wrong target is found before anything is read or made.
    store, *_ = [open_store(url, create=False) for url in urls]
    if repair and not (command == 'check' and isinstance(store, JSONLinesStore)):
        raise ValueError('--repair is for a check of a file of JSON lines')
    with store:
        if command == 'check':
            return _check(store, repair)
        if command == 'copy':
            return _copy(store, urls[1])
        for plant in store:
            print(_line(plant))
    return 0


def _check(store: PlantStore, repair: bool) -> int:
    progress = iter if repair else _progress()  # a stopped terminal keeps the lock
    if isinstance(store, JSONLinesStore):
        found = verify(store.path, repair=repair, progress=progress)
    else:  # a store without lines that can be damaged
        found = Verified(sum(1 for _ in progress(store)))
    for damage in found.damaged:
        print(escaped(damage))
    faults = len(found.damaged) + found.unnamed
    outcome = f'damaged: {faults}; --repair moves damaged lines to a side file'
    outcome = found.repaired or (outcome if faults else 'no damage')
    print(escaped(f'{found.plants} plants verified, {outcome}'))
    return int(faults > 0 and not found.repaired)


def _copy(source: PlantStore, url: str) -> int:
    bar = _progress()(source)
    # Not in the middle of the bar; without its lock, which an interrupt may upset.
    write = partial(bar.write, nolock=True) if hasattr(bar, 'write') else print
    counts = Counter({'copied': 0, 'already there': 0, 'conflicting': 0})
    parts = batches(bar, Plant.length)
    first = next(parts, [])  # a source that cannot be read makes no target
    with open_store(url) as target:
        try:
            target.load()
            for batch in chain([first], parts):
                for plant, outcome in zip(batch, _add(target, batch), strict=True):
                    kind = 'copied' if outcome else 'already there'
                    if isinstance(outcome, StoreError):
                        why = getattr(outcome, 'reason', '')  # a taken id has none
                        kind = 'refused' if why else 'conflicting'
                        write(f'{kind}: {_line(plant)} {why}'.rstrip())
                    counts[kind] += 1
        finally:
            parts.close()
            # Printed after an error, too: the copied plants stay, and a repeat goes on.
            print(', '.join(f'{name}: {count}' for name, count in counts.items()))
    return int(counts['conflicting'] + counts['refused'] > 0)


def _add(target: PlantStore, plants: Sequence[Plant]) -> Sequence[bool | Exception]:
    """Add plants; return the outcome of each, also if a rule refuses some of them."""
    try:
        return target.add_many(plants)
    except StoreUnavailable as ex:
        target.ping()  # raises if it takes no plants at all
        if len(plants) == 1:
            return [ex]
    middle = len(plants) // 2
    return [*_add(target, plants[:middle]), *_add(target, plants[middle:])]


def _progress() -> Progress:
    """Return a progress bar, shown on a terminal, or ``iter`` without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter
    return partial(tqdm, unit=' plants', leave=False, disable=None)


def _line(plant: Plant) -> str:
    """Return the record of a plant, escaped: control characters command a terminal."""
    line = record.encode(plant).decode()[:-1]  # six times that must be one
    return escaped(line) if len(line) <= record.LONGEST // 6 else line


if __name__ == '__main__':  # pragma: no cover
    sys.exit(main())
