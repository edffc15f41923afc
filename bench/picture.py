"""Draw the table of docs/benchmarks.md as docs/benchmarks.svg.

bench/peers/.venv/bin/python -m bench.picture
"""

import re
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent.parent / 'docs'
COLUMNS = ('16 connections', '64 connections')


def main() -> None:
    """Draw adds a second of every contender that stores plants."""
    matplotlib.use('svg')
    matplotlib.rcParams['svg.hashsalt'] = 'plants'  # the same picture each time
    from matplotlib import pyplot

    page = (DOCS / 'benchmarks.md').read_text()
    table = page.partition('<!-- bench -->')[2].partition('| | target')[0]
    rows = [
        (name.replace('`', ''), [float(cell.replace(',', '')) for cell in cells])
        for name, *cells in re.findall(
            r'^\| ([^|]+?) \| ([\d,]+) [^|]*\| ([\d,]+) ', table, re.M
        )
        if not name.startswith('Bare')
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1), tight_layout=True)
    for shift, column in enumerate(COLUMNS):
        axes.barh(
            [number + 0.4 * shift for number in range(len(rows))],
            [figures[shift] for _, figures in rows],
            height=0.38,
            label=column,
        )
    axes.set_yticks(
        [number + 0.2 for number in range(len(rows))], [name for name, _ in rows]
    )
    axes.invert_yaxis()
    axes.set_xlabel('plants added a second')
    axes.legend()
    figure.savefig(DOCS / 'benchmarks.svg', metadata={'Date': None})


if __name__ == '__main__':
    main()
