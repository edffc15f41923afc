"""Healthy clients beside hostile ones: ``python -m bench.hostile``.

200 connections drip a head and 200 drip a body, a byte each tenth of a second, and
never come to an end. The same healthy load is measured without and with them, round
after round, so that a noisy machine is noisy for both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from contextlib import contextmanager
from pathlib import Path

from bench.contenders import CONTENDERS
from bench.contenders import TOP
from bench.load import TOKEN
from bench.load import first_answer
from bench.load import load
from bench.serving import serving

HEAD = b'POST /plants HTTP/1.1\r\nHost: localhost\r\nX-Slow: '
BODY = (
    b'POST /plants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bench\r\n'
    b'Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n'
)
EACH = 200  # connections
PAUSE = 0.1  # seconds
TARGET = 2.0


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=5)
    parser.add_argument('--connections', type=int, default=16)
    options = parser.parse_args()
    if not shutil.which('wrk'):
        sys.exit('Error: install wrk (apt-get install wrk)')
    rows: dict[str, list[tuple[float, ...]]] = {'alone': [], 'beside 400 slow ones': []}
    for _ in range(options.rounds):
        for (name, rounds), slow in zip(rows.items(), (0, EACH), strict=True):
            rounds.append(measure(slow, options.connections, options.seconds))
            print(f'{name}: {rounds[-1]}', file=sys.stderr)
    print('| | requests/s | p50, ms | p99, ms | workers, MiB |\n|---|---|---|---|---|')
    medians = []
    for name, rounds in rows.items():
        rate, p50, p99, memory = map(statistics.median, zip(*rounds, strict=True))
        medians.append(p99)
        print(f'| {name} | {rate:,.0f} | {p50:.2f} | {p99:.2f} | {memory:.0f} |')
    print(f'\np99 beside / alone: {medians[1] / medians[0]:.2f}; target: {TARGET:.2f}')


def measure(slow: int, connections: int, seconds: int) -> tuple[float, ...]:
    """Run one round.

    Args:
        slow: How many connections drip a head, and how many a body.
        connections: How many are healthy.
        seconds: How long.

    Returns:
        Requests a second, p50 and p99 in ms, and what the workers have in memory, MiB.
    """
    contender = CONTENDERS['jsonl']
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as directory:
        settings = {
            'PLANTS_TOKENS': TOKEN,
            'PLANTS_STORE': f'jsonl:{directory}/plants.jsonl',
        }
        with serving(contender.command, settings, contender.directory) as server:
            first_answer(server)
            time.sleep(1)  # until all workers are there: the first would take them all
            with dripping(server.port, slow):
                time.sleep(1)  # until they are taken: the healthy would queue behind
                seen = load(server, connections, seconds, first_id=1000)
                memory = resident(server.process.pid)
    return seen.rate, seen.p50_ms, seen.p99_ms, memory


@contextmanager
def dripping(port: int, slow: int) -> Iterator[None]:
    """Keep slow clients connected, and check that none was answered or closed."""
    with ExitStack() as stack:
        clients = []
        for start in (HEAD, BODY):
            for _ in range(slow):
                client = socket.create_connection(('127.0.0.1', port), 10)
                clients.append(stack.enter_context(client))
                client.sendall(start)
        done = threading.Event()

        def drip() -> None:
            while not done.wait(PAUSE):
                for client in clients:
                    client.sendall(b' ')

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        for client in clients:
            client.setblocking(False)
            try:
                raise AssertionError(f'a slow client was told {client.recv(99)!r}')
            except BlockingIOError:
                pass


def resident(master: int) -> float:
    """Return how much memory the workers of a master have, in MiB."""
    pids = Path(f'/proc/{master}/task/{master}/children').read_text().split()
    pages = (int(Path(f'/proc/{pid}/statm').read_text().split()[1]) for pid in pids)
    return sum(pages) * os.sysconf('SC_PAGE_SIZE') / 2**20


if __name__ == '__main__':
    main()
