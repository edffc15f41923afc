"""The figures of a run, and their tables in Markdown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.contenders import Contender

CONNECTIONS = (16, 64)
DELAYS_MS = (0, 2)


class Case(NamedTuple):
    """A contender under a load, on a disk.

    Attributes:
        name: The name of the contender.
        connections: The number of clients, each with a persistent connection.
        delay_ms: The delay that is added to each sync, in milliseconds.
    """

    name: str
    connections: int = CONNECTIONS[0]
    delay_ms: int = DELAYS_MS[0]


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


CASES = [(connections, delay) for delay in DELAYS_MS for connections in CONNECTIONS]
ON_THIS_DISK = [case for case in CASES if case[1] == 0]
AT_64 = [case for case in CASES if case[0] == 64]


class Target(NamedTuple):
    """A bound for a figure of a contender, or for its ratio to the best of others.

    Attributes:
        name: The name of the contender.
        figure: The figure. A rate should be at least the bound, any other at most.
        bound: In the unit of the figure, or a ratio.
        others: The contenders by whose best figure it is divided, if any.
        cases: The connections and delays for which the bound holds.
    """

    name: str
    figure: str
    bound: float
    others: tuple[str, ...] = ()
    cases: Sequence[tuple[int, int]] = CASES


SQLITE_PYTHON = ('fastapi-sqlite', 'flask-sqlite')
TARGETS = [
    Target('jsonl', 'rate', 1, ('jsonl-beside',)),
    Target('postgresql', 'rate', 1, ('postgresql-beside',)),
    Target('jsonl', 'p99_ms', 1, ('jsonl-beside',), AT_64),
    Target('postgresql', 'p99_ms', 1, ('postgresql-beside',), AT_64),
    Target('jsonl', 'cpu_us', 1, ('jsonl-beside',)),
    Target('postgresql', 'cpu_us', 1, ('postgresql-beside',)),
    Target('jsonl', 'rate', 1, ('jsonl-gthread',)),
    Target('jsonl', 'rate', 1, ('jsonl-gevent',)),
    Target('jsonl', 'rate', 1.3, ('floor-gthread',), ON_THIS_DISK),
    Target('jsonl', 'rate', 2.5, SQLITE_PYTHON),
    Target('jsonl', 'rate', 1.5, ('fastify-sqlite',)),
    Target('postgresql', 'rate', 1, ('fastapi-asyncpg', 'fastify-pg')),
    Target('jsonl', 'p99_ms', 0.5, SQLITE_PYTHON),
    Target('jsonl', 'memory_mib', 60, cases=CASES[:1]),
    Target('jsonl', 'first_answer_s', 0.5, cases=CASES[:1]),
]
FIGURES = {
    'rate': 'adds/s',
    'p99_ms': 'p99',
    'cpu_us': 'CPU an add',
    'memory_mib': 'memory, MiB',
    'first_answer_s': 'start to first 200, s',
}
LOADS = ' | '.join(
    f'{connections} connections' + (f', syncs {delay} ms slower' if delay else '')
    for connections, delay in CASES
)


def markdown(run: Run) -> str:
    """Return the tables."""
    return '\n'.join([run.conditions, '', *figures_table(run), '', *targets_table(run)])


def figures_table(run: Run) -> Iterator[str]:
    """Yield the lines of a table with a row for each contender."""
    others = (
        'adds a sync, 64 | CPU an add, us, 64 | start to first 200, s | memory, MiB'
    )
    yield f'| | {LOADS} | {others} |'
    yield '|---' * (len(CASES) + 5) + '|'
    for name, contender in run.contenders.items():
        cells = [contender.label]
        for case in CASES:
            rate = run.median(Case(name, *case), 'rate')
            p99 = run.median(Case(name, *case), 'p99_ms')
            cells.append('' if rate is None else f'{rate:,.0f} ({p99:,.1f})')
        syncs = run.median(Case(name, 64), 'syncs_per_add')
        cells.append(f'{1 / syncs:.1f}' if syncs else '')
        for case, figure, digits in (
            (AT_64[0], 'cpu_us', 0),
            (CASES[0], 'first_answer_s', 2),
            (CASES[0], 'memory_mib', 0),
        ):
            value = run.median(Case(name, *case), figure)
            cells.append('' if value is None else f'{value:.{digits}f}')
        yield f'| {" | ".join(cells)} |'


def targets_table(run: Run) -> Iterator[str]:
    """Yield the lines of a table with a row for each target that was measured."""
    yield f'| | target | {LOADS} |'
    yield '|---' * (len(CASES) + 2) + '|'
    for target in TARGETS:
        cells = [cell(run, target, case) for case in CASES]
        if any(cells):
            what = f'{FIGURES[target.figure]}: {run.contenders[target.name].label}'
            others = [
                x.label for name, x in run.contenders.items() if name in target.others
            ]
            if others:
                better = 'the better of ' if others[1:] else ''
                what += f' / {better}{" and ".join(others)}'
            sign = '>=' if target.figure == 'rate' else '<='
            yield f'| {what} | {sign} {target.bound:g} | {" | ".join(cells)} |'


def cell(run: Run, target: Target, case: tuple[int, int]) -> str:
    """Return the value for a target, marked MISSED if it is not met."""
    value = run.median(Case(target.name, *case), target.figure)
    others = [run.median(Case(name, *case), target.figure) for name in target.others]
    measured = [other for other in others if other]
    if case not in target.cases or value is None or (others and not measured):
        return ''
    more_is_better = target.figure == 'rate'
    if measured:
        value /= max(measured) if more_is_better else min(measured)
    value = round(value, 2)
    met = value >= target.bound if more_is_better else value <= target.bound
    return f'{value:.2f}' if met else f'{value:.2f} MISSED'
