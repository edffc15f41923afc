"""Healthy clients beside hostile ones: ``python -m bench.hostile``.

The same healthy load is measured alone; beside 400 clients that drip (200 a head and
200 a body, a byte each tenth of a second, without an end); beside 300 clients without a
token that pipeline 100 requests at a time; and beside 400 that ask three times for the
largest file of the page and read nothing, of which 100 a second are replaced. The four
are measured in turn, round after round, so that noise of the machine affects all of
them.
"""

import argparse
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from bench.contenders import TOP, Contender, add_options, chosen
from bench.load import TOKEN, first_answer, load
from bench.serving import Failed, memory, serving

HEAD = b'POST /plants HTTP/1.1\r\nHost: localhost\r\nX-Slow: '
BODY = (
    b'POST /plants HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n'
    b'Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n'
) % TOKEN.encode()
DRIPPING = 400  # clients
DRIP_PAUSE = 0.1  # seconds
PIPELINING = 300  # clients
BURST = 100  # requests that a client sends before it reads their responses
REQUEST = b'GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n'
ANSWER = b'HTTP/1.1 401 '
UNREAD = 400  # clients
UNREAD_PAUSE = 0.01  # seconds
LARGE = b'GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n'
MOST_P99_RATIO = 2.0  # the target: p99 beside hostile clients / p99 alone


@contextmanager
def connected(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Yield connections to a server."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(('127.0.0.1', port), 10))
            for _ in range(count)
        ]


@contextmanager
def repeating(step: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly in a thread, until the end of the block.

    Raises:
        Failed: The function failed.
    """
    done = threading.Event()
    errors: list[Exception] = []

    def repeat() -> None:
        try:
            while not done.is_set():
                step()
        except Exception as ex:
            errors.append(ex)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise Failed(f'a hostile client: {errors[0]!r}') from errors[0]


@contextmanager
def dripping(port: int) -> Iterator[None]:
    """Keep dripping clients connected; check that none was answered or closed."""
    with connected(port, DRIPPING) as clients:
        for number, client in enumerate(clients):
            client.sendall(BODY if number % 2 else HEAD)

        def drip() -> None:
            for client in clients:
                client.sendall(b' ')
            time.sleep(DRIP_PAUSE)

        with repeating(drip):
            yield
        for client in clients:
            client.setblocking(False)
            try:
                raise Failed(f'a dripping client was answered {client.recv(99)!r}')
            except BlockingIOError:
                pass


@contextmanager
def pipelining(port: int) -> Iterator[None]:
    """Keep clients connected that pipeline requests without a token."""
    with connected(port, PIPELINING) as clients, selectors.DefaultSelector() as ready:
        expected = dict.fromkeys(clients, BURST)
        tails = dict.fromkeys(clients, b'')  # a response may arrive in two parts
        for client in clients:
            client.sendall(REQUEST * BURST)
            ready.register(client, selectors.EVENT_READ)

        def pipeline() -> None:
            for key, _ in ready.select(0.1):
                client = key.fileobj
                assert isinstance(client, socket.socket)
                received = client.recv(65536)
                if not received:
                    raise ConnectionError('the server has closed the connection')
                received = tails[client] + received
                expected[client] -= received.count(ANSWER)
                tails[client] = received[1 - len(ANSWER) :]
                if not expected[client]:
                    client.sendall(REQUEST * BURST)
                    expected[client] = BURST

        with repeating(pipeline):
            yield


@contextmanager
def reading_nothing(port: int) -> Iterator[None]:
    """Keep clients connected that ask for a large file and read nothing."""
    with connected(port, UNREAD) as first:
        clients = deque(first)
        for client in first:
            client.sendall(3 * LARGE)

        def replace() -> None:
            clients.popleft().close()
            client = socket.create_connection(('127.0.0.1', port), 10)
            client.sendall(3 * LARGE)
            clients.append(client)
            time.sleep(UNREAD_PAUSE)

        try:
            with repeating(replace):
                yield
        finally:
            for client in clients:
                client.close()


CROWDS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    'alone': lambda port: nullcontext(),
    f'beside {DRIPPING} that drip': dripping,
    f'beside {PIPELINING} that pipeline': pipelining,
    f'beside {UNREAD} that read nothing': reading_nothing,
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog='python -m bench.hostile')
    parser.description = __doc__
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=int, default=5, help='of each measurement')
    parser.add_argument(
        '--connections', type=int, default=16, help='of healthy clients'
    )
    add_options(parser, default=['jsonl'])
    options = parser.parse_args()
    contenders = chosen(options)
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            for crowd in CROWDS:
                seen = measure(contender, crowd, options.connections, options.seconds)
                rows.setdefault((name, crowd), []).append(seen)
                print(f'{name}, {crowd}: {seen}', file=sys.stderr)
    print('| | | adds/s | p99, ms | longest, ms | memory, MiB | p99 / alone |')
    print('|---' * 7 + '|')
    for (name, crowd), rounds in rows.items():
        rate, p99, longest, mib = map(statistics.median, zip(*rounds, strict=True))
        ratio = p99 / statistics.median(alone[1] for alone in rows[name, 'alone'])
        missed = ' MISSED' if ratio > MOST_P99_RATIO else ''
        print(
            f'| {contenders[name].label} | {crowd} | {rate:,.0f} | {p99:.1f} '
            f'| {longest:.1f} | {mib:.0f} | {ratio:.2f}{missed} |'
        )


def measure(
    contender: Contender, crowd: str, connections: int, seconds: int
) -> tuple[float, float, float, float]:
    """Run one round.

    Returns:
        The adds a second, the p99 and the longest latency in ms of the healthy clients;
        and the memory of the server in MiB.
    """
    with tempfile.TemporaryDirectory(dir=TOP, prefix='.bench-') as directory:
        environ = {
            'PLANTS_TOKENS': TOKEN,
            'PLANTS_STORE': f'jsonl:{directory}/plants.jsonl',
        }
        with serving(contender.command, environ, contender.directory) as server:
            first_answer(server)
            time.sleep(1)  # until all workers run, or the first would accept them all
            with CROWDS[crowd](server.port):
                time.sleep(1)  # until all are accepted, before healthy clients connect
                healthy = load(server, connections, seconds, first_id=1000)
                mib = memory(server.process.pid)
    return healthy.rate, healthy.p99_ms, healthy.max_ms, mib


if __name__ == '__main__':
    main()
