"""A plant file with a million plants, beside an empty one: ``python -m bench.scale``.

Each measurement runs in a new process. The adds of the two are measured in turn, round
after round.
"""

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from bench.contenders import TOP
from store import Plant, open_store

Result = TypeVar('Result')
ADDS = 3_000
BATCH = 1_000
ROUNDS = 5


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='python -m bench.scale', description=__doc__)
    parser.add_argument('--plants', type=int, default=1_000_000)
    count = parser.parse_args().plants
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as directory:
        full, empty = (f'jsonl:{directory}/{name}.jsonl' for name in ('full', 'empty'))
        filled = call_in_child(partial(time_fill, count), full)
        opened = [call_in_child(load, full) for _ in range(ROUNDS)]
        seconds, memory = map(statistics.median, zip(*opened, strict=True))
        memory -= call_in_child(load, empty)[1]
        added: dict[str, list[tuple[float, float]]] = {full: [], empty: []}
        for _ in range(ROUNDS):
            for url, rounds in added.items():
                rounds.append(call_in_child(time_adds, url))
    (rate, p99), (empty_rate, empty_p99) = (
        map(statistics.median, zip(*rounds, strict=True)) for rounds in added.values()
    )
    print(f'| {count:,} plants | |')
    print('|---|---|')
    print(f'| bring them in, in batches of {BATCH:,} | {filled:.1f} s |')
    print(f'| open the file | {seconds:.2f} s |')
    print(f'| memory, above an empty file | {memory / count:.0f} bytes a plant |')
    print(
        f'| adds a second / adds a second to an empty file | {rate / empty_rate:.2f} |'
    )
    print(f'| p99 of an add / p99 with an empty file | {p99 / empty_p99:.2f} |')


def call_in_child(function: Callable[[str], Result], url: str) -> Result:
    """Call a function in a new process, so that only the page cache is warm."""
    with get_context('spawn').Pool(1) as pool:
        return pool.apply(function, (url,))


def time_fill(count: int, url: str) -> float:
    """Add plants with scattered ids, as ``copy`` does; return the time in seconds."""
    began = time.perf_counter()
    with open_store(url) as store:
        for start in range(0, count, BATCH):
            ids = range(start, start + BATCH)
            # A bijection of 64-bit integers.
            mixed = [(n * 0x9E3779B97F4A7C15 & (2**64 - 1)) - 2**63 for n in ids]
            store.add_many([Plant(id, 'Fern', 'shade') for id in mixed])
    return time.perf_counter() - began


def load(url: str) -> tuple[float, float]:
    """Open a store; return the time in seconds, and the resident memory in bytes."""
    began = time.perf_counter()
    with open_store(url) as store:
        store.load()
        seconds = time.perf_counter() - began
        pages = int(Path('/proc/self/statm').read_text().split()[1])
    return seconds, resource.getpagesize() * pages


def time_adds(url: str) -> tuple[float, float]:
    """Add new plants, one after the other; return adds a second, and the p99 in ms."""
    plants = [Plant(random.getrandbits(62), 'Fern') for _ in range(ADDS)]
    took = []
    with open_store(url) as store:
        store.load()
        for plant in plants:
            began = time.perf_counter()
            store.add(plant)
            took.append(1000 * (time.perf_counter() - began))
    return 1000 * ADDS / sum(took), sorted(took)[ADDS * 99 // 100]


if __name__ == '__main__':
    main()
