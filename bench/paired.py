"""Compare this checkout with an older one: ``python -m bench.paired CHECKOUT``.

Both servers run, and get the load in turn, in short slices, so that noise of the
machine affects both. Only the ratios of two neighbouring slices mean anything: their
median, and in brackets the lowest and the highest of them. A ratio is a difference only
if both of these are on one side of 1.
"""

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.contenders import CONTENDERS, gunicorn
from bench.serving import running


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='bench.paired', description=__doc__)
    add = parser.add_argument
    add('checkout', type=Path)
    add('--python', type=Path, help='its interpreter; default: that of its .venv')
    add('--store', choices=('jsonl', 'postgresql'), default='jsonl')
    add('--connections', type=int, nargs='+', default=[1, 4, 16, 64], metavar='N')
    add('--workers', default='2')
    add('--rounds', type=int, default=8)
    add('--seconds', type=int, default=2, help='of each slice')
    add('--slower', default='0', metavar='US', help='delay of each sync')
    add('--alone', action='store_true', help='syncs wait for each other')
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    python = options.python or checkout / '.venv/bin/python'
    workers, ours = ('-w', options.workers), CONTENDERS[options.store]
    contenders = [
        ours._replace(command=gunicorn(*workers, python=python), directory=checkout),
        ours._replace(command=gunicorn(*workers)),
    ]
    disk = {'SYNC_DELAY': options.slower} | (
        {'SYNC_ALONE': '1'} if options.alone else {}
    )
    with ExitStack() as stack:
        both = [stack.enter_context(running(one, disk)) for one in contenders]
        for server in both:
            server.load(16, 2)  # until both are warm
        print(f'| connections | {checkout.name}, adds/s | this | ratio | CPU an add |')
        print('|---' * 5 + '|')
        for count in options.connections:
            rates: tuple[list[float], ...] = [], []
            cpu_us: tuple[list[float], ...] = [], []
            for number in range(options.rounds):
                for place in (0, 1) if number % 2 else (1, 0):
                    done = both[place].load(count, options.seconds)
                    rates[place].append(done.rate)
                    cpu_us[place].append(1e6 * done.cpu_s / done.adds)
            middle = [f'{statistics.median(one):,.0f}' for one in rates]
            ratios = [compared(new, old) for old, new in (rates, cpu_us)]
            print(f'| {" | ".join([f"{count}", *middle, *ratios])} |', flush=True)


def compared(new: Sequence[float], old: Sequence[float]) -> str:
    """Return the ratio of figures that were measured in pairs, and how it varied."""
    ratios = [one / other for one, other in zip(new, old, strict=True)]
    return f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'


if __name__ == '__main__':
    main()
