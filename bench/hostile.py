"""Healthy clients beside hostile ones: ``python -m bench.hostile``.

The same load is measured alone; beside clients that drip (half of them a head, half a
body, a byte each tenth of a second, without an end); beside clients without a token
that pipeline; and beside clients that ask for the largest file of the page, read
nothing, and come again after four seconds.
"""

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from bench.contenders import CONTENDERS
from bench.serving import TOKEN, Failed, running

START = b'POST /plants HTTP/1.1\r\nHost: localhost\r\n'
HEAD = START + b'X-Slow: '
BODY = (
    START + b'Authorization: Bearer %s\r\nContent-Type: application/json\r\n'
    b'Content-Length: 60000\r\n\r\n'
) % TOKEN.encode()
BURST = 100  # requests that a client sends before it reads their responses
REQUEST = b'GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n'
LARGE = b'GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n'


def drip(number: int, port: int, done: Event) -> None:
    """Send a byte now and then; fail if there is an answer, or the end."""
    with socket.create_connection(('127.0.0.1', port), 10) as client:
        client.sendall(BODY if number % 2 else HEAD)
        while not done.wait(0.1):
            client.sendall(b' ')
        client.setblocking(False)
        try:
            raise Failed(f'a dripping client was answered {client.recv(99)!r}')
        except BlockingIOError:
            pass


def pipeline(number: int, port: int, done: Event) -> None:
    """Send requests without a token, many at a time; read their responses."""
    with socket.create_connection(('127.0.0.1', port), 10) as client:
        lines = client.makefile('rb')
        while not done.is_set():
            client.sendall(REQUEST * BURST)
            for _ in range(BURST):
                while not (line := lines.readline()).startswith(b'WWW-Authenticate'):
                    if not line:
                        raise Failed('a pipelining client was disconnected')


def read_nothing(number: int, port: int, done: Event) -> None:
    """Ask for a large file, read nothing, and come again."""
    while not done.is_set():
        with socket.create_connection(('127.0.0.1', port), 10) as client:
            client.sendall(3 * LARGE)
            done.wait(4)


CROWDS = {
    'alone': (1, lambda *_: None),
    'beside 400 that drip': (400, drip),
    'beside 300 that pipeline': (300, pipeline),
    'beside 400 that read nothing': (400, read_nothing),
}


@contextmanager
def crowd(
    count: int, client: Callable[[int, int, Event], None], port: int
) -> Iterator[None]:
    """Run clients until the end of the block; fail if one does."""
    done = Event()
    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(client, number, port, done) for number in range(count)]
        try:
            yield
        finally:
            done.set()
    for each in clients:
        each.result()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='bench.hostile', description=__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=5, help='of each measurement')
    options = parser.parse_args()
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in CROWDS}
    for _ in range(options.rounds):
        for name, (count, client) in CROWDS.items():
            with running(CONTENDERS['jsonl'], {}) as ours:
                time.sleep(1)  # until all workers run
                with crowd(count, client, ours.port):
                    time.sleep(1)  # until all are connected
                    healthy = ours.load(16, options.seconds)
            rows[name].append((healthy.rate, healthy.p99_ms, healthy.max_ms))
            print(f'{name}: {rows[name][-1]}', file=sys.stderr)
    print('| | adds/s | p99, ms | longest, ms |')
    print('|---' * 4 + '|')
    for name, rounds in rows.items():
        figures = map(statistics.median, zip(*rounds, strict=True))
        print(f'| {name} | {" | ".join(f"{it:,.0f}" for it in figures)} |')


if __name__ == '__main__':
    main()
