"""A plant file with a million plants, beside an empty one: ``python -m bench.scale``.

The two are measured in turn, round after round, each time in a new process.
"""

import argparse
import random
import resource
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from bench.paired import compared
from bench.serving import TOP
from store import Plant, open_store

ADDS, BATCH, ROUNDS = 3_000, 1_000, 5


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='bench.scale', description=__doc__)
    parser.add_argument('--plants', type=int, default=1_000_000)
    count = parser.parse_args().plants
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as directory:
        full, empty = (f'jsonl:{directory}/{name}.jsonl' for name in ('full', 'empty'))
        began = time.perf_counter()
        fill(full, count)
        filled_s = time.perf_counter() - began
        # From one process to the next, only the page cache is warm.
        both = [
            get_context('spawn').Pool(1, maxtasksperchild=1).map(measure, (full, empty))
            for _ in range(ROUNDS)
        ]
    (open_s, size, add_s, p99_s), (_, no_size, no_add_s, no_p99_s) = (
        zip(*rounds, strict=True) for rounds in zip(*both, strict=True)
    )
    a_plant = (statistics.median(size) - statistics.median(no_size)) / count
    print(f'| {count:,} plants | |')
    print('|---|---|')
    print(f'| bring them in, in batches of {BATCH:,} | {filled_s:.1f} s |')
    print(f'| open the file | {statistics.median(open_s):.1f} s |')
    print(f'| memory, above an empty file | {a_plant:.0f} bytes a plant |')
    print(f'| an add / an add to an empty file | {compared(add_s, no_add_s)} |')
    print(f'| p99 of an add / p99 with an empty file | {compared(p99_s, no_p99_s)} |')


def fill(url: str, count: int) -> None:
    """Add plants with scattered ids, as ``copy`` does."""
    with open_store(url) as store:
        for start in range(0, count, BATCH):
            ids = range(start, start + BATCH)
            # A bijection of 64-bit integers.
            mixed = [(n * 0x9E3779B97F4A7C15 & (2**64 - 1)) - 2**63 for n in ids]
            store.add_many([Plant(id, 'Fern', 'shade') for id in mixed])


def measure(url: str) -> tuple[float, float, float, float]:
    """Open a store, and add new plants to it, one after the other.

    Return the seconds of the opening, the bytes of memory after it, and the seconds of
    an add: their mean and their p99.
    """
    plants = [Plant(random.getrandbits(62), 'Fern') for _ in range(ADDS)]
    took = []
    began = time.perf_counter()
    with open_store(url) as store:
        store.load()
        open_s = time.perf_counter() - began
        pages = int(Path('/proc/self/statm').read_text().split()[1])
        for plant in plants:
            began = time.perf_counter()
            store.add(plant)
            took.append(time.perf_counter() - began)
    size = resource.getpagesize() * pages
    return open_s, size, sum(took) / ADDS, sorted(took)[ADDS * 99 // 100]


if __name__ == '__main__':
    main()
