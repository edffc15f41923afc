"""Healthy clients beside hostile ones: ``python -m bench.hostile``.

The same load is measured alone; beside clients that drip (half of them a head, half a
body, a byte each tenth of a second, without an end); beside clients without a token
that pipeline; and beside clients that ask for the largest file of the page, read
nothing, and come again after four seconds.
"""

import argparse
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event

from bench.contenders import CONTENDERS
from bench.serving import TOKEN, Failed, running

START = b'POST /plants HTTP/1.1\r\nHost: localhost\r\n'
BODY = (
    START + b'Authorization: Bearer %s\r\nContent-Type: application/json\r\n'
    b'Content-Length: 60000\r\n\r\n'
) % TOKEN.encode()
BURST = 100  # requests that a client sends before it reads their responses
REQUEST = b'GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n'
LARGE = b'GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n'


def drip(clients: list[socket.socket], done: Event) -> None:
    """Send a byte now and then; fail if there is an answer."""
    for number, client in enumerate(clients):
        client.sendall(BODY if number % 2 else START + b'X-Slow: ')
    while not done.wait(0.1):
        for client in clients:
            client.sendall(b' ')
    if select.select(clients, [], [], 0)[0]:
        raise Failed('a dripping client was answered')


def pipeline(clients: list[socket.socket], done: Event) -> None:
    """Send requests without a token, many at a time; read their responses."""
    answers = [client.makefile('rb') for client in clients]
    while not done.is_set():
        for client in clients:
            client.sendall(REQUEST * BURST)
        for lines in answers * BURST:
            while not (line := lines.readline()).startswith(b'www-authenticate'):
                if not line:
                    raise Failed('a pipelining client was disconnected')


def read_nothing(clients: list[socket.socket], done: Event) -> None:
    """Ask for a large file, and read nothing."""
    for client in clients:
        client.sendall(3 * LARGE)
    done.wait(4)


Client = Callable[[list[socket.socket], Event], object]
# Four threads have so many clients each, which come again when they have ended.
CROWDS: dict[str, tuple[int, Client]] = {
    'alone': (0, lambda _, done: done.wait()),
    'beside 400 that drip': (100, drip),
    'beside 300 that pipeline': (75, pipeline),
    'beside 400 that read nothing': (100, read_nothing),
}


def run(port: int, count: int, client: Client, done: Event) -> None:
    """Connect clients, again and again."""
    while not done.is_set():
        with ExitStack() as stack:
            new = [socket.create_connection(('127.0.0.1', port)) for _ in range(count)]
            client([*map(stack.enter_context, new)], done)


@contextmanager
def crowd(port: int, count: int, client: Client) -> Iterator[None]:
    """Run clients until the end of the block; fail if one does."""
    done = Event()
    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(run, port, count, client, done) for _ in range(4)]
        try:
            yield
        finally:
            done.set()
    for thread in threads:
        thread.result()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='bench.hostile', description=__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=5, help='of each measurement')
    options = parser.parse_args()
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in CROWDS}
    for _ in range(options.rounds):
        for name, clients in CROWDS.items():
            with running(CONTENDERS['jsonl'], {}) as ours:
                time.sleep(1)  # until all workers run
                with crowd(ours.port, *clients):
                    time.sleep(1)  # until all are connected
                    healthy = ours.load(16, options.seconds)
            rows[name].append((healthy.rate, healthy.p99_ms, healthy.max_ms))
    print('| | adds/s | p99, ms | longest, ms |\n|---|---|---|---|')
    for name, rounds in rows.items():
        figures = map(statistics.median, zip(*rounds, strict=True))
        print(f'| {name} | {" | ".join(f"{it:,.0f}" for it in figures)} |')


if __name__ == '__main__':
    main()
