"""Requests a second, side by side: ``python -m bench.throughput``.

Every contender is measured in turn, round after round, so that a noisy machine is noisy
for all of them; what counts is the median, and the ratio between two of one run. After
each round the stored plants are counted and compared with the 200 answers: a fast wrong
server does not count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TOP = HERE.parent


class Contender(NamedTuple):
    """Something to measure.

    Attributes:
        name: For the table.
        app: What gunicorn serves.
        stores: Whether it stores what it answers with 200.
        slow: Whether each of its syncs takes 2 ms longer.
        connections: How many clients there are, each on a kept connection.
    """

    name: str
    app: str
    stores: bool
    slow: bool
    connections: int


class Result(NamedTuple):
    """What a round has shown: requests a second, latencies in microseconds."""

    rate: float
    p50: float
    p99: float


CONTENDERS = [
    Contender('floor', 'bench.floor:app', False, False, 16),
    Contender('jsonl', 'app:app', True, False, 16),
    Contender('jsonl, 64 connections', 'app:app', True, False, 64),
    Contender('jsonl, 64 connections, slow syncs', 'app:app', True, True, 64),
]
RATIOS = [
    ('jsonl', 'floor', 0.65),
    ('jsonl, 64 connections, slow syncs', 'jsonl, 64 connections', 0.70),
]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=5)
    options = parser.parse_args()
    if not shutil.which('wrk'):
        sys.exit('Error: install wrk (apt-get install wrk)')
    results: dict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=TOP) as directory:
        shim = build_shim(Path(directory))
        for _ in range(options.rounds):
            for contender in CONTENDERS:
                store = Path(directory) / 'plants.jsonl'
                result = measure(contender, store, shim, options.seconds)
                results[contender.name].append(result)
                print(f'{contender.name}: {result.rate:.0f}/s', file=sys.stderr)
    medians = {
        name: Result(*map(statistics.median, zip(*rounds, strict=True)))
        for name, rounds in results.items()
    }
    print('| | requests/s | p50, ms | p99, ms |\n|---|---|---|---|')
    for name, median in medians.items():
        print(
            f'| {name} | {median.rate:,.0f} | {median.p50 / 1000:.2f} '
            f'| {median.p99 / 1000:.2f} |'
        )
    print('\n| ratio | | target |\n|---|---|---|')
    for above, below, target in RATIOS:
        ratio = medians[above].rate / medians[below].rate
        print(f'| {above} / {below} | {ratio:.2f} | {target:.2f} |')


def build_shim(directory: Path) -> Path:
    """Compile the library that slows syncs down."""
    shim = directory / 'slow_sync.so'
    source = HERE / 'slow_sync.c'
    command = ['cc', '-shared', '-fPIC', '-O2', '-o', f'{shim}', f'{source}', '-ldl']
    subprocess.run(command, check=True)
    return shim


def measure(contender: Contender, store: Path, shim: Path, seconds: int) -> Result:
    """Run one round of one contender, and check what it has stored."""
    for path in store.parent.glob(f'{store.name}*'):
        path.unlink()
    environ = {
        **os.environ,
        'PLANTS_TOKENS': 'bench',
        'PLANTS_STORE': f'jsonl:{store}',
    }
    if contender.slow:
        environ['LD_PRELOAD'] = str(shim)
    with serving(contender.app, environ) as (address, _):
        output = post_plants(address, contender.connections, seconds, first_id=1)
        line = next(x for x in output.splitlines() if x.startswith('RESULT'))
        answers, duration, refused, broken, p50, p99 = map(float, line.split()[1:])
        assert not refused, 'some answers were not 200'
        assert not broken, 'some requests had no answer'
    if contender.stores:
        # What was under way when wrk stopped may be stored without its answer.
        stored = store.read_bytes().count(b'\n')
        assert answers <= stored <= answers + contender.connections, (answers, stored)
    return Result(answers / duration * 1e6, p50, p99)


def post_plants(address: str, connections: int, seconds: int, first_id: int) -> str:
    """Post as many plants as the server takes; return what wrk prints."""
    command = [
        *('wrk', '-t2', f'-c{connections}', f'-d{seconds}s'),
        *('-s', f'{HERE}/post.lua', f'{address}/plants', '--', f'{first_id}'),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def serving(app: str, environ: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Serve an application with our gunicorn settings, 2 workers; yield URL and pid."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, '-m', 'gunicorn', '-w', '2'),
            *('-b', f'127.0.0.1:{port}', app),
        ],
        cwd=TOP,
        env=environ,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f'http://127.0.0.1:{port}'
        for _ in range(100):
            try:
                urllib.request.urlopen(f'{address}/livez').close()
                break
            except OSError:
                time.sleep(0.1)
        # Until the second worker serves too: no request would tell.
        time.sleep(1)
        yield address, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == '__main__':
    main()
