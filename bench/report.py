"""The figures of a run, and their tables in Markdown."""

import math
import re
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from bench.contenders import CONTENDERS, JSONL, PG, POSTGRESQL, SQLITE
from bench.serving import TOP


class Case(NamedTuple):
    """A number of clients, each with a persistent connection, and a disk."""

    connections: int
    disk: str = ''


# By disk, the first of which is this one: the environment variables of the library in
# slow_sync.c, and the numbers of connections.
SLOWER = {'SYNC_DELAY': '2000'}
DISKS = {
    '': ({'SYNC_DELAY': '0'}, (1, 4, 16, 64)),
    'syncs 2 ms slower': (SLOWER, (16, 64)),
    'syncs 2 ms slower, one at a time': (SLOWER | {'SYNC_ALONE': '1'}, (16,)),
}
CASES = [Case(count, disk) for disk, (_, counts) in DISKS.items() for count in counts]
CROWD = Case(64)
# More columns: their titles, and figures of the crowd.
OTHERS = {
    'adds a sync, 64': 'adds_per_sync',
    'CPU an add, us, 64': 'cpu_us',
    'start to first 200, s': 'first_answer_s',
    'memory, MiB': 'memory_mib',
}
# Of each kind of store this service and the fastest of the others; the rest, and what
# slower disks do, is on the page.
README_ROWS = JSONL, SQLITE, POSTGRESQL, PG
README_COLUMNS = 1, 4, 64

# From each contender and case to the figures of its rounds.
Run = dict[tuple[str, Case], list[dict[str, float]]]


def best(run: Run, label: str, case: Case) -> dict[str, float]:
    """Return the medians of the fastest contender with this label, if any."""
    medians = [
        {figure: statistics.median(r[figure] for r in rounds) for figure in rounds[0]}
        for (name, measured), rounds in run.items()
        if CONTENDERS[name].label == label and measured == case
    ]
    return max(medians, key=lambda figures: figures['rate'], default={})


def cell(run: Run, label: str, case: Case) -> str:
    """Return the adds a second, and the p99 in ms in brackets."""
    found = best(run, label, case)
    return f'{two(found["rate"])} ({two(found["p99_ms"])})' if found else ''


def two(value: float) -> str:
    """Return two significant digits of a positive figure: more would be noise."""
    digits = 1 - math.floor(math.log10(value))
    return f'{round(value, digits):,.{max(0, digits)}f}'


def table(run: Run) -> str:
    """Return the table of the page."""
    loads = [', '.join(filter(None, (f'{c}', disk))) for c, disk in CASES]
    lines = [*head(*loads, *OTHERS)]
    for label in dict.fromkeys(CONTENDERS[name].label for name, _ in run):
        crowd = best(run, label, CROWD)
        cells = [cell(run, label, case) for case in CASES]
        cells += [two(crowd[name]) if crowd else '' for name in OTHERS.values()]
        lines.append(f'| {" | ".join([label, *cells])} |')
    return '\n'.join(lines)


def short_table(run: Run) -> str:
    """Return the table of the README."""
    first, *others = README_COLUMNS
    lines = [*head(f'{first} connection', *map(str, others))]
    for label in README_ROWS:
        cells = [cell(run, label, Case(count)) for count in README_COLUMNS]
        lines.append(f'| {" | ".join([label, *cells])} |')
    return '\n'.join(lines)


def head(*titles: str) -> Iterator[str]:
    """Yield the first lines of a table whose first column has no title."""
    yield f'| | {" | ".join(titles)} |'
    yield '|---' * (1 + len(titles)) + '|'


def replace(name: str, text: str) -> None:
    """Replace what a page has between two marks."""
    page = TOP / name
    between = re.compile('(?<=<!-- bench -->\n).*(?=<!-- /bench -->)', re.DOTALL)
    page.write_text(between.sub(lambda _: f'{text}\n', page.read_text()))
