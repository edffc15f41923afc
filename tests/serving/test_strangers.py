"""What a stranger at the port costs: CPU, memory, connections, and the kernel's memory.

CPU time and memory are those of the worker. A bound is three times what was measured,
because the machine may be busy. Version 1.3.0 exceeded all but those of idle clients.
"""

import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from exchange import LARGE_FILE, assert_quick, chunked, fern, table
from machine import count_sockets, locked, only_worker
from server import PATIENCE, Server, TLSServer, request, wait_until

# Coverage costs CPU and memory of its own.
UNMEASURED = {'COVERAGE_PROCESS_CONFIG': None}
NO_LIMITS = ['client.FIRST_REQUEST = client.REQUEST_TIMEOUT = 3600']
NO_LIMITS += ['client.LINGER = keepalive = 3600']

LONG_HEAD = request(**{f'x-{n}': 'a' * 4_000 for n in range(7)}, content_length='60000')
NO_TOKEN = request(authorization=None, content_length='60000')
WANTED = request(content_length='60000', content_type='application/json')
MEGABYTE = request(authorization=None, content_length='1000000')
EXTENSION = b'1;a="%b"\r\n \r\n' % (b'x' * 8_000)
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
    'head': (TLSServer, b'', LONG_HEAD[:-2], 1),
    'end of a head': (TLSServer, LONG_HEAD[:24_000], LONG_HEAD[24_000:-2], 1),
    'body': (TLSServer, WANTED, b' ' * 59_000, 1),
    'body without a token': (TLSServer, NO_TOKEN, b' ' * 59_000, 1),
    'long body without a token': (TLSServer, MEGABYTE, b' ' * 59_000, 1),
    'chunks': (Server, CHUNKED, b'1\r\n \r\n' * 60_000, 60_000),
    'extensions': (Server, CHUNKED, 2_000 * EXTENSION, 99_999),
}


@table('kind, begin, rest, size', SMALL_PIECES)
def test_small_pieces_cost_little_cpu(servers, kind, begin, rest, size):
    """A head or a body in pieces of a byte, and what is in its chunks, is refused."""
    server = servers[kind]
    pid = only_worker(server)

    def cost():
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
            return cpu_time(pid) - before

    # Other processes only add to it: they empty the caches of the core.
    assert any(cost() < 0.12 for _ in range(5))


# What is sent, how much of it is the client's own, and how much may come to it, in KiB.
WITHHELD = {
    'silent': (b'', 16),
    'idle': (request('GET', '/livez'), 16),
    'head': (LONG_HEAD[:-2], 60),
    'no token': (NO_TOKEN + b' ' * 59_000, 32),
    'no path': (request(target='/x', content_length='60000') + b' ' * 59_000, 32),
    'long, no token': (MEGABYTE + b' ' * 900_000, 32),
    'head, no token': (LONG_HEAD.replace(b'Bearer', b'Basic') + b' ' * 59_000, 80),
    'wanted': (WANTED + b' ' * 59_000, 134),
    'wanted chunk': (CHUNKED + b'ea60\r\n' + b' ' * 59_000, 134),
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
        # Of the length of one read no head is kept, and of shorter ones few.
        for number, size, most in ((250, 8_000, 2_000), (1_000, 3_800, 8_000)):
            before = proportional_memory(pid)
            for at in range(number):
                lines = {
                    f'x-{n}': f'{at} ' * (2_000 // len(f'{at} ')) for n in range(5)
                }
                head = request('GET', '/livez', **lines)[:size]
                assert client.ask(head + b'\r\n\r\n').status == 200
            assert proportional_memory(pid) - before < most


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


HALF_HEAD = request()[:40]
HALF_BODY = NO_TOKEN + b' '
STALLED = {
    'heads': HALF_HEAD,
    'bodies': request(body=b' ', content_length='1000'),
    'bodies after an answer': HALF_BODY,
    'answers': request('GET', LARGE_FILE) * 4,
}


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    """A server without time limits, but with few connections."""
    directory = tmp_path_factory.mktemp('small')
    lines = [*NO_LIMITS, 'worker_connections = 20']
    with Server(directory, conf=lines) as server:
        yield server


@pytest.fixture
def opened(small):
    """An exit stack for clients of that server, which has no others yet."""
    free = count_sockets(small)
    with ExitStack() as opened:
        yield opened
    wait_until(lambda: count_sockets(small) <= free, 'all of them are closed')


@pytest.mark.parametrize('data', STALLED.values(), ids=STALLED)
def test_stalled_clients_make_room(small, opened, data):
    """Clients that stall hold no connection of a full worker; the others are served."""
    healthy = opened.enter_context(small.connect())
    # The limits are an hour: only a place that is made lets the last one in.
    for _ in range(30):
        client = opened.enter_context(small.connect())
        client.send(data)
        assert healthy.ask(request(body=fern())).status == 200
    late = opened.enter_context(small.connect())
    late.send(request(body=fern()))
    while not late.is_readable(0.5):
        assert healthy.ask(request(body=fern())).status == 200
    assert late.receive().status == 200
    assert healthy.ask(request(body=fern())).status == 200


def test_idle_clients_make_room_before_stalled_ones(small, opened):
    """First idle connections end, then unfinished heads, then unfinished bodies."""

    def connect(number, data=b''):
        clients = [opened.enter_context(small.connect()) for _ in range(number)]
        for client in clients:
            client.send(data)
        return clients

    bodies = connect(8, STALLED['bodies'])
    heads, idle = connect(8, HALF_HEAD), connect(4)
    time.sleep(2.5)  # all may be closed now, but nobody waits
    assert not any(client.is_readable() for client in [*bodies, *heads, *idle])
    while not any(client.is_readable() for client in heads):
        # Two at once are closed for the first that waits, of twenty.
        (late,) = connect(1, HALF_BODY)
        assert late.receive().status == 401
    assert all(client.is_readable() for client in idle)
    assert not any(client.is_readable() for client in bodies)


def test_request_that_goes_on_is_no_stalled_one(tmp_path):
    """A head that has just begun, and a body that goes on, are read and answered."""
    lines = [*NO_LIMITS, 'worker_connections = 1']
    with Server(tmp_path, conf=lines) as server, server.connect() as client:
        assert client.ask(request(body=fern())).status == 200
        time.sleep(2.5)  # it may be closed now, but nobody waits
        client.send(HALF_HEAD)
        with server.connect() as late:
            late.send(request(body=fern()))
            time.sleep(0.7)
            client.send(request()[40:])
            assert client.receive() is not None
            assert late.receive().status == 200
    with Server(tmp_path, conf=lines) as server, server.connect() as client:
        body = json.dumps(fern(name='a' * 4_000)).encode()
        client.send(request(body=body)[: -len(body)])
        with server.connect() as late, locked(tmp_path / 'plants.jsonl'):
            late.send(request(body=fern()))
            for start in range(0, len(body), 300):  # it takes 2.8 s
                time.sleep(0.2)
                client.send(body[start : start + 300])
            time.sleep(2.5)
        answer = client.receive()
        assert (answer.status, answer.announces_close) == (200, False)
