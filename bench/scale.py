"""The JSON-lines store with ten million plants: ``python -m bench.scale``."""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from bench.contenders import CONTENDERS
from bench.load import first_answer
from bench.load import load
from bench.serving import serving
from store import Plant
from store import PlantStore
from store import open_store
from store.jsonl import record

ADDS = 2_000
ROUNDS = 7


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--plants', type=int, default=10_000_000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent.parent) as directory:
        full = f'jsonl:{directory}/full.jsonl'
        empty = f'jsonl:{directory}/empty.jsonl'
        write_plants(Path(directory) / 'full.jsonl', options.plants)
        first = run_in_child(time_open, full)
        again = run_in_child(time_open, full)
        run_in_child(time_open, empty)
        private, anonymous = (
            above - below
            for above, below in zip(
                worker_memory(full), worker_memory(empty), strict=True
            )
        )
        rates: dict[str, list[float]] = {full: [], empty: []}
        ratios = []
        for number in range(ROUNDS):
            for url, seen in rates.items():
                seen.append(run_in_child(add_new, url, number))
            ratios.append(run_in_child(repeat_to_new, full, number, options.plants))
    ratio = statistics.median(rates[full]) / statistics.median(rates[empty])
    print(f'| {options.plants:,} plants | | target |\n|---|---|---|')
    print(f'| first open, without an index | {first:.1f} s | < 60 s |')
    print(f'| open, with an index | {again:.3f} s | < 0.5 s |')
    print(
        f'| private memory of a worker over an empty one | {private:.1f} MiB '
        f'| < 16 MiB |'
    )
    print(f'| of it not backed by the index file | {anonymous:.1f} MiB | |')
    print(f'| adds/s, as a ratio to an empty store | {ratio:.2f} | >= 0.85 |')
    print(
        f'| p99 of a repeat, as a ratio to a new plant '
        f'| {statistics.median(ratios):.2f} | <= 1.5 |'
    )


def write_plants(path: Path, count: int) -> None:
    """Write a file of plants with ids in no order."""
    with path.open('wb') as file:
        for number in range(count):
            file.write(record.encode(Plant(scattered(number), 'Fern', 'shade')))


def scattered(number: int) -> int:
    """Return the id of the plant with a number: a bijection, in no visible order."""
    return (number * 0x9E3779B97F4A7C15 & (2**64 - 1)) - 2**63


def run_in_child(function: object, *arguments: object) -> float:
    """Call a function in a fresh process, so that nothing is warm but the disk."""
    with get_context('spawn').Pool(1, init_child) as pool:
        result: float = pool.apply(function, arguments)  # type: ignore[arg-type]
        return result


def init_child() -> None:
    """Let a child's progress be seen."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)


def time_open(url: str) -> float:
    """Return how long the store takes to be ready, in seconds."""
    began = time.perf_counter()
    with open_store(url) as store:
        store.ping()
        return time.perf_counter() - began


def worker_memory(url: str) -> tuple[float, float]:
    """Return the private and the anonymous memory of a worker, in MiB.

    The larger of two, after a burst of adds. Pages of the index that only one process
    has touched count as private too.
    """
    contender = CONTENDERS['jsonl']
    environ = {'PLANTS_TOKENS': contender.token, 'PLANTS_STORE': url}
    with serving(contender.command, environ, contender.directory) as server:
        first_answer(server, contender)
        load(server, contender, 16, 10, first_id=random.getrandbits(52))
        pid = server.process.pid
        children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
        return (
            max(smaps(pid, 'Private') for pid in children),
            max(smaps(pid, 'Anonymous') for pid in children),
        )


def smaps(pid: str, kind: str) -> float:
    """Return how much memory of a kind a process has, in MiB."""
    rows = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith(kind)) / 1024


def add_new(url: str, round: int) -> float:
    """Return how many new plants are added a second, one after the other."""
    with open_store(url) as store:
        store.ping()
        plants = [Plant(random.getrandbits(62), f'Fern {round}') for _ in range(ADDS)]
        return ADDS / sum(add_all(store, plants))


def repeat_to_new(url: str, round: int, count: int) -> float:
    """Return the p99 of repeats as a ratio to the p99 of new plants."""
    numbers = random.sample(range(count), ADDS)
    repeats = [Plant(scattered(number), 'Fern', 'shade') for number in numbers]
    new = [Plant(random.getrandbits(62), f'Fern {round}') for _ in range(ADDS)]
    with open_store(url) as store:
        store.ping()
        took_new = add_all(store, new)
        took_repeats = add_all(store, repeats)
    return p99(took_repeats) / p99(took_new)


def add_all(store: PlantStore, plants: list[Plant]) -> list[float]:
    """Add plants; return how long each took, in seconds."""
    took = []
    for plant in plants:
        began = time.perf_counter()
        store.add(plant)
        took.append(time.perf_counter() - began)
    return took


def p99(values: list[float]) -> float:
    """Return the value that one in a hundred exceeds."""
    return sorted(values)[len(values) * 99 // 100]


if __name__ == '__main__':
    main()
