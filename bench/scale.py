"""The JSON lines store with ten million plants: ``python -m bench.scale``.

It is compared with an empty store, in turn, round after round. Each measurement runs
in a new process.
"""

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from bench.contenders import CONTENDERS, TOP
from bench.load import TOKEN, first_answer, load
from bench.serving import serving
from store import Plant, open_store
from store.jsonl.disk import remove_index

Result = TypeVar('Result')
ADDS = 3_000
BATCH = 1_000
SOME = 100_000
ADDS_BEFORE_KILL = 300
ROUNDS = 5


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='python -m bench.scale', description=__doc__)
    parser.add_argument('--plants', type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as directory:
        full = f'jsonl:{directory}/full.jsonl'
        empty = f'jsonl:{directory}/empty.jsonl'
        filled = call_in_child(partial(time_fill, options.plants), full)
        again = call_in_child(time_open, full)
        remove_index(Path(directory) / 'full.jsonl')
        first = call_in_child(time_open, full)
        call_in_child(time_fill_some, full)
        after_copy = call_in_child(time_open, full)
        after_copy -= call_in_child(time_open, empty)
        private = worker_memory(full) - worker_memory(empty)
        added: dict[str, list[tuple[float, ...]]] = {full: [], empty: []}
        after_kill = []
        for _ in range(ROUNDS):
            for url, rounds in added.items():
                rounds.append(call_in_child(time_adds, url))
            kill_while_adding(full)
            after_kill.append(call_in_child(time_open, full))
    (rate, p99, longest), (empty_rate, empty_p99, empty_longest) = (
        map(statistics.median, zip(*rounds, strict=True)) for rounds in added.values()
    )
    print(f'| {options.plants:,} plants | | target |')
    print('|---|---|---|')
    print(f'| bring them in, in batches of {BATCH:,} | {filled:.0f} s | < 100 s |')
    print(f'| open right after that | {again:.3f} s | < 0.5 s |')
    print(f'| first open, without an index | {first:.1f} s | < 60 s |')
    print(f'| open after {SOME:,} more, above empty | {after_copy:.3f} s | < 0.5 s |')
    print(f'| open after `kill -9`, the longest | {max(after_kill):.3f} s | < 0.5 s |')
    print(f'| private memory of a worker, above empty | {private:.1f} MiB | < 16 MiB |')
    print(
        f'| adds/s, as a ratio to an empty store | {rate / empty_rate:.2f} | >= 0.9 |'
    )
    print(f'| p99 of an add, as a ratio to empty | {p99 / empty_p99:.2f} | <= 1.5 |')
    print(f'| longest add | {longest:.1f} ms, empty {empty_longest:.1f} ms | |')


def time_fill(count: int, url: str) -> float:
    """Add plants with ids in no order, as ``copy`` does; return the time in seconds."""
    began = time.perf_counter()
    with open_store(url) as store:
        for start in range(0, count, BATCH):
            store.add_many(
                # A bijection of 64-bit integers.
                [
                    Plant(
                        (n * 0x9E3779B97F4A7C15 & (2**64 - 1)) - 2**63, 'Fern', 'shade'
                    )
                    for n in range(start, start + BATCH)
                ]
            )
    return time.perf_counter() - began


def time_fill_some(url: str) -> float:
    """Add some plants with random ids in batches; return the time in seconds."""
    began = time.perf_counter()
    with open_store(url) as store:
        for _ in range(SOME // BATCH):
            store.add_many(
                [Plant(random.getrandbits(62), 'Fern') for _ in range(BATCH)]
            )
    return time.perf_counter() - began


def call_in_child(function: Callable[[str], Result], url: str) -> Result:
    """Call a function in a new process, so that only the page cache is warm."""
    with get_context('spawn').Pool(1, show_progress) as pool:
        return pool.apply(function, (url,))


def show_progress() -> None:
    """Print the log of stores, for example the progress of a long open."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)


def time_open(url: str) -> float:
    """Return the time until a store is ready, in seconds."""
    began = time.perf_counter()
    with open_store(url) as store:
        store.ping()
        return time.perf_counter() - began


def time_adds(url: str) -> tuple[float, float, float]:
    """Add new plants, one after the other.

    Returns:
        Adds a second; the 99th percentile and the longest of their times, in ms.
    """
    plants = [Plant(random.getrandbits(62), 'Fern') for _ in range(ADDS)]
    took = []
    with open_store(url) as store:
        store.ping()
        for plant in plants:
            began = time.perf_counter()
            store.add(plant)
            took.append(1000 * (time.perf_counter() - began))
    return 1000 * ADDS / sum(took), sorted(took)[ADDS * 99 // 100], max(took)


def kill_while_adding(url: str) -> None:
    """Kill a process that adds plants, as ``kill -9`` does."""
    context = get_context('spawn')
    ours, its = context.Pipe()
    child = context.Process(target=add_forever, args=(url, its), daemon=True)
    child.start()
    for _ in range(ADDS_BEFORE_KILL):
        ours.recv()
    child.kill()
    child.join()


def add_forever(url: str, added: Connection) -> None:
    """Add new plants, and report each."""
    with open_store(url) as store:
        while True:
            store.add(Plant(random.getrandbits(62), 'Fern'))
            added.send(None)


def worker_memory(url: str) -> float:
    """Return the private memory of a worker after a burst of adds, in MiB.

    This is the larger figure of two workers. A page of a shared file that only one
    process has touched counts as private, too.
    """
    environ = {'PLANTS_TOKENS': TOKEN, 'PLANTS_STORE': url}
    with serving(CONTENDERS['jsonl'].command, environ, TOP) as server:
        first_answer(server)
        load(server, 16, 10, first_id=random.getrandbits(52))
        pid = server.process.pid
        children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
        return max(map(private_memory, children))


def private_memory(pid: str) -> float:
    """Return the private memory of a process, in MiB."""
    rows = Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith('Private')) / 1024


if __name__ == '__main__':
    main()
