"""Tables and a picture of the last whole run: ``python -m bench.report``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from typing import NamedTuple

from bench.contenders import CONTENDERS
from bench.contenders import Contender
from bench.contenders import postgresql

RESULTS = Path(__file__).resolve().parent / 'results'
FIGURES = RESULTS / 'figures.json'
PICTURE = RESULTS / 'requests.svg'
PAGE = RESULTS / 'README.md'

# What a run has shown, as it is kept: see measure_all() in bench/__main__.py.
Run = dict[str, Any]
OURS = ('memory', 'jsonl', 'jsonl-granian', 'postgresql')
SQLITE_PYTHON = ('fastapi-sqlite', 'flask-sqlite', 'datasette')


class Figure(NamedTuple):
    """The median of what the rounds of a case have shown.

    Attributes:
        name: Of the contender.
        connections: How many clients there are.
        delay_ms: How much longer each sync takes, in milliseconds.
        member: Which figure: ``rate``, ``p99_ms`` ...
    """

    name: str
    connections: int = 16
    delay_ms: int = 0
    member: str = 'rate'

    def median(self, run: Run) -> float | None:
        """Return it, or ``None`` if it was not measured."""
        for case in run['loads']:
            if (case['name'], case['connections'], case['delay_ms']) == self[:3]:
                seen = [r[self.member] for r in case['rounds'] if self.member in r]
                return statistics.median(seen) if seen else None
        return None


class Target(NamedTuple):
    """What a figure, or its ratio to another one, should be.

    Attributes:
        above: The figure.
        below: What it is divided by: the best of these.
        bound: The target, in the figure's unit or as a ratio.
        at_least: Whether more is better.
        unit: Of the bound.
    """

    above: Figure
    below: tuple[Figure, ...]
    bound: float
    at_least: bool = True
    unit: str = ''


def best_of(names: tuple[str, ...], connections: int) -> tuple[Figure, ...]:
    """Return the same figure of several contenders."""
    return tuple(Figure(name, connections) for name in names)


TARGETS = [
    Target(Figure('jsonl'), (Figure('floor'),), 0.75),
    Target(Figure('jsonl'), (Figure('gthread'),), 0.75),
    Target(Figure('memory'), (Figure('floor-1'),), 0.85),
    Target(Figure('memory'), (Figure('gthread-1'),), 0.85),
    Target(Figure('postgresql'), (Figure('floor'),), 0.50),
    Target(Figure('postgresql'), (Figure('gthread'),), 0.50),
    Target(Figure('jsonl', 16), best_of(SQLITE_PYTHON, 16), 2.5),
    Target(Figure('jsonl', 64), best_of(SQLITE_PYTHON, 64), 2.5),
    Target(Figure('jsonl-granian', 16), (Figure('fastify-sqlite', 16),), 1.5),
    Target(Figure('jsonl-granian', 64), (Figure('fastify-sqlite', 64),), 1.5),
    Target(Figure('jsonl', 64, 2), (Figure('fastify-sqlite', 64, 2),), 15),
    Target(Figure('postgresql', 64), (Figure('fastapi-asyncpg', 64),), 1.7),
    Target(Figure('postgresql', 64, 2), (Figure('fastapi-asyncpg-32', 64, 2),), 1.5),
    Target(
        Figure('jsonl', member='p99_ms'),
        (Figure('fastapi-sqlite', member='p99_ms'),),
        0.5,
        at_least=False,
    ),
    Target(Figure('jsonl', member='memory_mib'), (), 60, at_least=False, unit=' MiB'),
    Target(
        Figure('jsonl', member='first_answer_s'), (), 0.5, at_least=False, unit=' s'
    ),
]


def save(run: Run) -> None:
    """Keep the figures and draw the picture."""
    RESULTS.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(run, indent=1) + '\n')
    PICTURE.write_text(picture(run))
    PAGE.write_text(
        f'# Measured by `make bench`\n\n![]({PICTURE.name})\n\n{text(run)}\n'
    )


def text(run: Run) -> str:
    """Return tables in Markdown."""
    return '\n'.join([*cases_table(run), '', *targets_table(run)])


def cases_table(run: Run) -> Iterator[str]:
    """Yield the lines of a table with a row for each contender."""
    machine = run['machine']
    yield (
        f'{machine["cores"]} cores, Python {machine["python"]}, '
        f'a write and its sync take {machine["sync_ms"]:.2f} ms. '
        'wrk and PostgreSQL run on the same cores. '
        '2 workers or processes, if not said otherwise. '
        'Requests a second and, in brackets, the p99 in ms: '
        f'medians of {run["rounds"]} rounds of {run["seconds"]} s. '
        'Memory is the PSS of all processes of the idle server, without PostgreSQL.'
    )
    yield ''
    yield (
        '| | 16 connections | 64 connections | 16, syncs 2 ms slower '
        '| 64, syncs 2 ms slower | answers a sync, 64 | first answer, s | memory, MiB |'
    )
    yield '|---' * 8 + '|'
    measured = {case['name'] for case in run['loads']}
    for name, contender in CONTENDERS.items():
        if name not in measured:
            continue
        cells = [contender.label]
        for delay_ms in (0, 2):
            for connections in (16, 64):
                rate = Figure(name, connections, delay_ms).median(run)
                p99 = Figure(name, connections, delay_ms, 'p99_ms').median(run)
                cells.append('' if rate is None else f'{rate:,.0f} ({p99:,.0f})')
        syncs = Figure(name, 64, 0, 'syncs').median(run)
        cells.append(f'{1 / syncs:.1f}' if syncs else '')
        for member, digits in (('first_answer_s', 2), ('memory_mib', 0)):
            value = Figure(name, member=member).median(run)
            cells.append('' if value is None else f'{value:.{digits}f}')
        yield f'| {" | ".join(cells)} |'


def targets_table(run: Run) -> Iterator[str]:
    """Yield the lines of a table with a row for each target that was measured."""
    yield '| what | | target | |'
    yield '|---' * 4 + '|'
    for target in TARGETS:
        value = target.above.median(run)
        others = {figure.name: figure.median(run) for figure in target.below}
        below = {name: other for name, other in others.items() if other}
        if value is None or (target.below and not below):
            continue
        label = describe(target.above)
        if below:
            pick = max if target.at_least else min
            best = pick(below, key=lambda name: below[name])
            value /= below[best]
            label += f' / {CONTENDERS[best].label}'
        met = value >= target.bound if target.at_least else value <= target.bound
        sign = '>=' if target.at_least else '<='
        yield (
            f'| {label} | {value:.2f}{target.unit} '
            f'| {sign} {target.bound:g}{target.unit} | {"met" if met else "MISSED"} |'
        )


def describe(figure: Figure) -> str:
    """Name a figure for a person."""
    what = {
        'rate': 'requests/s',
        'p99_ms': 'p99',
        'memory_mib': 'memory, idle',
        'first_answer_s': 'from the command to the first 200',
    }[figure.member]
    if figure.member in ('rate', 'p99_ms'):
        what += f' at {figure.connections} connections'
    if figure.delay_ms:
        what += f', syncs {figure.delay_ms} ms slower'
    return f'{what}: {CONTENDERS[figure.name].label}'


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .page { fill: #ffffff }
  .small, .value { font-size: 11px; fill: #59636e }
  .title, .ours-label { font-weight: 600 }
  .title { font-size: 15px }
  .line { stroke: #d1d9e0 }
  .ours { fill: #1a7f4b } .ours.slow { fill: #7cc79d }
  .other { fill: #6e7b88 } .other.slow { fill: #b9c2ca }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .page { fill: #0d1117 }
    .small, .value { fill: #9198a1 }
    .line { stroke: #3d444d }
    .ours { fill: #3fb97a } .ours.slow { fill: #1f6b45 }
    .other { fill: #8b98a5 } .other.slow { fill: #4b555f }
  }
"""
# In pixels.
LABELS, PANEL, GAP, BAR, ROW, MARGIN = 360, 260, 70, 10, 34, 20
GROUPS = ('Nothing is synced to a disk', 'A file on this machine', 'PostgreSQL')


def picture(run: Run) -> str:
    """Return bars, drawn as SVG, for light and for dark pages."""
    measured = {case['name'] for case in run['loads']}
    rates = [Figure(*case).median(run) or 0 for case in cases_of(run)]
    scale = PANEL / max([1.0, *rates])
    drawn = [
        f'<text class="title" x="{MARGIN}" y="32">Plants added a second</text>',
        *legend(),
    ]
    for column, connections in enumerate((16, 64)):
        left = LABELS + column * (PANEL + GAP)
        drawn.append(f'<text x="{left}" y="84">{connections} connections</text>')
    top = 92
    for group in GROUPS:
        top += 26
        drawn.append(f'<text class="small" x="{MARGIN}" y="{top - 8}">{group}</text>')
        drawn.append(
            f'<path class="line" d="M{MARGIN} {top}H{LABELS + 2 * (PANEL + GAP)}"/>'
        )
        top += 6
        for name, contender in CONTENDERS.items():
            if name in measured and group_of(contender) == group:
                drawn += row(run, name, top, scale)
                top += ROW
    width, height = LABELS + 2 * (PANEL + GAP) + MARGIN, top + MARGIN
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f'aria-label="Plants added a second, by each server">',
            f'<style>{STYLE}</style>',
            f'<rect class="page" width="{width}" height="{height}"/>',
            *drawn,
            '</svg>\n',
        ]
    )


def cases_of(run: Run) -> Iterator[tuple[str, int, int]]:
    """Yield what was measured: contender, connections, delay."""
    for case in run['loads']:
        yield case['name'], case['connections'], case['delay_ms']


def group_of(contender: Contender) -> str:
    """Return the group that a contender is drawn in."""
    if not contender.syncs:
        return GROUPS[0]
    return GROUPS[2] if contender.database is postgresql else GROUPS[1]


def legend() -> Iterator[str]:
    """Yield what the colours of the bars mean."""
    left = MARGIN
    for kind, meaning in (
        ('ours', 'plant store'),
        ('other', 'others'),
        ('ours slow', ''),
        ('other slow', 'a disk whose syncs take 2 ms longer'),
    ):
        yield f'<rect class="{kind}" x="{left}" y="46" width="14" height="{BAR}"/>'
        yield f'<text class="small" x="{left + 20}" y="54">{meaning}</text>'
        left += 20 + (7 * len(meaning) + 14 if meaning else 0)


def row(run: Run, name: str, top: int, scale: float) -> Iterator[str]:
    """Yield the bars of a contender."""
    kind = 'ours' if name in OURS else 'other'
    label = escape(CONTENDERS[name].label)
    yield f'<text class="{kind}-label" x="{MARGIN}" y="{top + 18}">{label}</text>'
    for column, connections in enumerate((16, 64)):
        left = LABELS + column * (PANEL + GAP)
        seen = {d: Figure(name, connections, d).median(run) for d in (0, 2)}
        bars = [(delay_ms, rate) for delay_ms, rate in seen.items() if rate is not None]
        # A single bar stands in the middle of its row.
        y = top + 2 if len(bars) == 2 else top + 2 + (BAR + 1) // 2
        for delay_ms, rate in bars:
            slow = ' slow' if delay_ms else ''
            length = max(1.0, rate * scale)
            yield (
                f'<rect class="{kind}{slow}" x="{left}" y="{y}" '
                f'width="{length:.1f}" height="{BAR}"/>'
            )
            yield (
                f'<text class="value" x="{left + length + 6:.1f}" y="{y + BAR - 1}">'
                f'{rate:,.0f}</text>'
            )
            y += BAR + 3


if __name__ == '__main__':
    last: Run = json.loads(FIGURES.read_text())
    save(last)
    print(text(last))
