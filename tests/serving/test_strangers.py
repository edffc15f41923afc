"""What a stranger at the port costs: CPU, memory, connections, and the kernel's memory.

CPU time and memory are those of the worker. A bound is three times what was measured,
because the machine may be busy.
"""

import re
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

import pytest
from exchange import LARGE_FILE, assert_quick, chunked, fern, table
from machine import count_sockets, only_worker
from server import PATIENCE, Server, TLSServer, request, wait_until

# Coverage costs CPU and memory of its own.
UNMEASURED = {'COVERAGE_PROCESS_CONFIG': None}
NO_LIMITS = ['connection.FIRST_REQUEST = connection.REQUEST_TIMEOUT = 3600']
NO_LIMITS += ['keepalive = 3600']

LONG_HEAD = request(**{f'x-{n}': 'a' * 4_000 for n in range(7)}, content_length='60000')
NO_TOKEN = request(authorization=None, content_length='60000')
WANTED = request(content_length='60000', content_type='application/json')
EXTENSION = b'1;a="%b"\r\n \r\n' % (b'x' * 3_000)
CHUNKED = chunked(end=b'', content_type='application/json')


def cpu_time(pid):
    """Return the CPU time of the main thread of a process, in seconds."""
    return int(Path(f'/proc/{pid}/schedstat').read_text().split()[0]) / 1e9


def proportional_memory(pid):
    """Return the PSS of a process without that of files, in KiB."""
    # The programs and libraries, 31 MB, count more whenever another Python ends.
    rollup = Path(f'/proc/{pid}/smaps_rollup').read_text()
    return int(re.search(r'^Pss_Anon: +(\d+)', rollup, re.M)[1])


@pytest.fixture(scope='module')
def servers(tmp_path_factory):
    """A server of each kind, with its costs alone."""
    directories = [tmp_path_factory.mktemp(name) for name in ('plain', 'tls')]
    with (
        Server(directories[0], **UNMEASURED) as plain,
        TLSServer(directories[1], **UNMEASURED) as tls,
    ):
        yield {Server: plain, TLSServer: tls}


SMALL_PIECES = {
    'head': (TLSServer, b'', LONG_HEAD[:-2], 1, 2),
    'end of a head': (TLSServer, LONG_HEAD[:24_000], LONG_HEAD[24_000:-2], 1, 1),
    'body': (TLSServer, WANTED, b' ' * 59_000, 1, 4),
    'chunks': (Server, CHUNKED, b'1\r\n \r\n' * 65_536, 60_000, 0.4),
    'pieces of chunks': (Server, CHUNKED, b'1\r\n \r\n' * 5_000, 1, 3),
    'a size': (Server, CHUNKED, b'1;a=' + b'x' * 4_000, 1, 1),
    'trailers': (Server, CHUNKED + b'0\r\n', b'X: y\r\n' * 5_000, 1, 3),
    'extensions': (Server, CHUNKED, 2_000 * EXTENSION, 99_999, 0.1),
}


@table('kind, begin, rest, size, most', SMALL_PIECES)
def test_small_pieces_cost_little_cpu(servers, kind, begin, rest, size, most):
    """Bytes that come one by one, and what is in chunks, cost no more than packets."""
    server = servers[kind]
    pid = only_worker(server)
    with server.connect() as client:
        client._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = cpu_time(pid)
        with suppress(OSError):  # it may be closed before all is sent
            client._socket.sendall(begin)
            for start in range(0, len(rest), size):
                client._socket.sendall(rest[start : start + size])
        client.finish_sending()
        wait_until(lambda: client.is_readable(0.1), 'it is answered or closed')
    assert server.ask(request(body=fern())).status == 200
    assert cpu_time(pid) - before < most


# What is sent, and how much memory may come to it, in KiB.
WITHHELD = {
    'silent': (b'', 48),
    'idle': (request('GET', '/livez'), 48),
    'head': (LONG_HEAD[:-2], 28 + 102),
    'no token': (NO_TOKEN + b' ' * 59_000, 58 + 102),
    'wanted': (WANTED + b' ' * 59_000, 58 + 102),
    'wanted chunk': (CHUNKED + b'ea60\r\n' + b' ' * 59_000, 58 + 102),
    'head and body': (LONG_HEAD + b' ' * 59_000, 86 + 102),
    'refused': (request(content_length='1000000') + b' ' * 900_000, 48),
}


def test_unfinished_request_takes_little_memory(tmp_path, subtests):
    """It takes little more than its bytes that are used, and delays nobody."""
    number, how = 100, {'conf': NO_LIMITS, **UNMEASURED}
    with Server(tmp_path, **how) as server, ExitStack() as opened:
        for _ in range(20):  # the first requests load code
            assert server.ask(request(body=fern())).status == 200
            assert server.ask(request('GET', '/x', authorization=None)).status == 401
        pid = only_worker(server)
        # All connections stay open: memory of one that ends would be used again.
        for name, (data, most) in WITHHELD.items():
            before = proportional_memory(pid)
            for _ in range(number):
                client = opened.enter_context(server.connect())
                client.send(data)
            wait_until(lambda: unread_bytes(server, 'server') == 0, 'all is received')
            assert_quick(server)
            grown = (proportional_memory(pid) - before) / number
            with subtests.test(name):
                assert grown < most, f'{grown:.1f} KiB'
        assert only_worker(server) == pid


def test_heads_of_strangers_are_not_kept(tmp_path):
    """A client that sends other heads all the time fills little memory with them."""
    with Server(tmp_path, **UNMEASURED) as server, server.connect() as client:
        pid = only_worker(server)
        for _ in range(20):  # the first requests load code
            assert client.ask(request('GET', '/livez')).status == 200
        before = proportional_memory(pid)
        for at in range(1_000):
            lines = {f'x-{at}-{"n" * 4_000}': f'{at} ' * 100, 'host': f'{at}' * 1_000}
            assert client.ask(request('GET', f'/livez?{at}', **lines)).status == 200
        grown = proportional_memory(pid) - before
        assert grown < 6_000


def unread_bytes(server, side):
    """Return how many bytes the largest queue of the server's sockets holds."""
    column = {'answers': 0, 'server': 1}[side]
    queues = [0]
    for line in Path('/proc/net/tcp').read_text().splitlines()[1:]:
        _, local, _, state, queue, *_ = line.split()
        if local.endswith(f':{server.port:04X}') and state == '01':
            queues.append(int(queue.split(':')[column], 16))
    return max(queues)


def test_unread_answer_takes_little_memory_of_the_kernel(tmp_path):
    """128 KiB of what nobody reads are in the kernel, and little in the worker."""
    with Server(tmp_path, **UNMEASURED) as server, ExitStack() as opened:
        assert server.ask(request('GET', LARGE_FILE)).status == 200
        before = proportional_memory(only_worker(server))
        for requests in [150, *[4] * 20]:  # of each client
            client = opened.enter_context(server.connect())
            client.send(request('GET', LARGE_FILE) * requests)
            assert client.is_readable(PATIENCE)
            # What it sends before the kernel would have let the buffer grow.
            wait_until(
                lambda: unread_bytes(server, 'answers') > 50_000, 'the buffer is full'
            )
        for _ in range(5):
            assert server.ask(request(body=fern())).status == 200
        assert unread_bytes(server, 'answers') <= 128 * 1024
        # The answers have more than 128 MiB, those of one client and those of all.
        assert proportional_memory(only_worker(server)) - before < 20 * 1024


STALLED = {
    'idle': request('GET', '/livez'),
    'silent': b'',
    'heads': request()[:40],
    'bodies': request(body=b' ', content_length='1000'),
    'answers': request('GET', LARGE_FILE) * 4,
}


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """A server without time limits, but with few connections."""
    directory = tmp_path_factory.mktemp('small')
    with Server(directory, conf=[*NO_LIMITS, 'worker_connections = 20']) as server:
        yield server


@pytest.mark.parametrize('data', STALLED.values(), ids=STALLED)
def test_stalled_clients_make_room(small, data):
    """Clients that stall hold no connection of a full worker; the others are served."""
    free = count_sockets(small)
    with ExitStack() as opened:
        healthy = opened.enter_context(small.connect())
        # The limits are an hour: only a place that is made lets the last one in.
        for _ in range(30):
            client = opened.enter_context(small.connect())
            client.send(data)
            assert healthy.ask(request(body=fern())).status == 200
        late = opened.enter_context(small.connect())
        late.send(request(body=fern()))
        while not late.is_readable(0.2):
            assert healthy.ask(request(body=fern())).status == 200
        assert late.receive().status == 200
        assert healthy.ask(request(body=fern())).status == 200
    wait_until(lambda: count_sockets(small) <= free, 'all of them are closed')


def assert_served_beside(server, flood):
    """Check that adds are answered while a function floods the server."""
    begun, done = Event(), Event()
    with ThreadPoolExecutor(1) as pool, server.connect() as healthy:
        flooding = pool.submit(flood, begun, done)
        try:
            assert begun.wait(PATIENCE)
            until = time.monotonic() + 3
            while time.monotonic() < until:
                began = time.monotonic()
                assert healthy.ask(request(body=fern())).status == 200
                assert time.monotonic() - began < PATIENCE / 4
        finally:
            done.set()
        flooding.result()


def test_pipelining_clients_delay_nobody(tmp_path):
    """While 900 clients pipeline, adds of another are answered."""
    refused = request('GET', '/x', authorization=None)
    both = selectors.EVENT_READ | selectors.EVENT_WRITE
    with Server(tmp_path, **UNMEASURED) as server, ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for _ in range(900):
            sock = opened.enter_context(server.connect())._socket
            sock.setblocking(False)
            selector.register(sock, both)

        def pipeline(begun, done):
            while not done.is_set():
                for key, events in selector.select(0.1):
                    with suppress(BlockingIOError, ConnectionError):
                        if events & selectors.EVENT_READ:
                            key.fileobj.recv(2**18)
                        if events & selectors.EVENT_WRITE:
                            key.fileobj.send(50 * refused)
                begun.set()

        assert_served_beside(server, pipeline)


ENDLESS = {
    'chunks': (Server, CHUNKED, 10_000 * b'1\r\n \r\n'),
    'a refused body': (Server, request(content_length=10**15), bytes(2**20)),
    'the same with TLS': (TLSServer, request(content_length=10**15), bytes(2**20)),
}


@table('kind, begin, piece', ENDLESS)
def test_body_that_never_pauses_delays_nobody(servers, kind, begin, piece):
    """While clients send without an end, adds of another are answered."""

    def send(begun, done):
        while not done.is_set():
            with servers[kind].connect() as client, suppress(OSError):
                client._socket.sendall(begin)
                while not done.is_set():
                    client._socket.sendall(piece)
                    begun.set()

    assert_served_beside(servers[kind], send)
