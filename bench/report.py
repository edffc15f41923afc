"""The figures of a run, and their table in Markdown."""

import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.contenders import TOP, Contender

# Environment variables of the library in slow_sync.c, by disk; the first is this one.
DISKS = {
    '': {'SYNC_DELAY': '0'},
    'syncs 2 ms slower': {'SYNC_DELAY': '2000'},
    'syncs 2 ms slower, one at a time': {'SYNC_DELAY': '2000', 'SYNC_ALONE': '1'},
}
SLOWER, ALONE = [*DISKS][1:]


class Case(NamedTuple):
    """A contender under a load, on a disk.

    Attributes:
        name: The name of the contender.
        connections: The number of clients, each with a persistent connection.
        disk: What the disk is like; a name of ``DISKS``.
    """

    name: str
    connections: int = 16
    disk: str = ''


CASES = [(16, ''), (64, ''), (16, SLOWER), (64, SLOWER), (16, ALONE)]


@dataclass
class Run:
    """The figures of a run.

    Attributes:
        contenders: The contenders, by name.
        conditions: A description of the machine and of the measurements.
        figures: From each case to the figures of its rounds: ``rate``, ``p99_ms`` ...
        failed: From each case that was left out to the reason.
    """

    contenders: Mapping[str, Contender]
    conditions: str
    figures: dict[Case, list[dict[str, float]]] = field(default_factory=dict)
    failed: dict[Case, str] = field(default_factory=dict)

    def median(self, case: Case, figure: str) -> float | None:
        """Return the median of the rounds, or ``None`` if it was not measured."""
        rounds = [] if case in self.failed else self.figures.get(case, [])
        values = [measured[figure] for measured in rounds if figure in measured]
        return statistics.median(values) if values else None


def connections(case: Case) -> str:
    """Return the number of connections of a case in words."""
    return f'{case.connections} connections'


def markdown(run: Run) -> str:
    """Return the table, a row for each contender."""
    return '\n'.join([run.conditions, '', *lines(run)])


def write_pages(run: Run) -> None:
    """Replace the tables in the pages; the README has the durable ones, in short."""
    _replace(TOP / 'docs/benchmarks.md', markdown(run))
    short = ['| | 16 connections | 64 | 16, syncs 2 ms slower, one at a time |']
    short.append('|---|---|---|---|')
    for contender, line in zip(run.contenders.values(), [*lines(run)][2:], strict=True):
        if contender.syncs:
            cells = [cell.strip() for cell in line.split('|')[1:-1]]
            short.append(f'| {" | ".join([*cells[:3], cells[5]])} |')
    _replace(TOP / 'README.md', '\n'.join(short))


def _replace(page: Path, table: str) -> None:
    between = re.compile('(?<=<!-- bench -->\n).*(?=<!-- /bench -->)', re.DOTALL)
    page.write_text(between.sub(lambda _: f'{table}\n', page.read_text()))


def lines(run: Run) -> Iterator[str]:
    """Yield the lines of the table."""
    first, at_64 = CASES[:2]
    others = (
        ('adds a sync, 64', at_64, 'adds_per_sync', 1),
        ('CPU an add, us, 64', at_64, 'cpu_us', 0),
        ('start to first 200, s', first, 'first_answer_s', 2),
        ('memory, MiB', first, 'memory_mib', 0),
    )
    loads = [', '.join(filter(None, (f'{c}', disk))) for c, disk in CASES]
    yield f'| | {" | ".join([*loads, *(title for title, *_ in others)])} |'
    yield '|---' * (1 + len(CASES) + len(others)) + '|'
    for name, contender in run.contenders.items():
        cells = [contender.label]
        for case in CASES:
            rate = run.median(Case(name, *case), 'rate')
            p99 = run.median(Case(name, *case), 'p99_ms')
            cells.append('' if rate is None else f'{rate:,.0f} ({p99:,.1f})')
        for _, case, figure, digits in others:
            value = run.median(Case(name, *case), figure)
            cells.append('' if value is None else f'{value:.{digits}f}')
        yield f'| {" | ".join(cells)} |'
