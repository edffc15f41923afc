"""What clients may cost that are slow, silent, endless or gone: time, memory, places.

Every other client is served meanwhile. Memory is that of the worker; a bound is three
times what was measured.
"""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from ssl import SSLEOFError

import pytest
from exchange import LARGE_FILE, assert_error, assert_quick, chunked, fern, receive_last
from machine import count_sockets, kib, locked, only_worker, paused
from server import PATIENCE, Server, request, time_limits, wait_until

PROBE = request('GET', '/livez')
LARGE = request('GET', LARGE_FILE)
SLOW_HEAD = b'POST /plants HTTP/1.1\r\nX-Slow: '
SLOW_BODY = request(body=b' ', content_length='1000')
NO_TOKEN = request(body=b'a' * 70_000, authorization=None)
CHUNKED = chunked(end=b'', content_type='application/json')

# ---- time

# With the value of the answer, or none if the head is incomplete.
INCOMPLETE = {
    SLOW_HEAD: None,
    SLOW_BODY: 40000,
    chunked(b' ', end=b'100\r\n'): 40000,
    chunked(b' ', end=b'0\r\nX: '): 40000,
}


def test_incomplete_request_is_ended_at_its_time_limit(impatient):
    """It is ended, also if bytes come; the next request has a limit of its own."""
    with ExitStack() as opened, impatient.connect() as kept:
        clients = []
        for before, data in product((b'', PROBE), INCOMPLETE):
            clients.append(opened.enter_context(impatient.connect()))
            clients[-1].send(before + data)
            assert not before or clients[-1].receive().status == 200

        def ended():
            assert kept.ask(PROBE).status == 200
            waiting = [client for client in clients if not client.is_readable(0.01)]
            for client in waiting:
                client.send(b' ' if client in clients[: len(INCOMPLETE)] else b'')
            return not waiting

        wait_until(ended, 'the requests are ended')
        for client, value in zip(clients, 2 * [*INCOMPLETE.values()], strict=True):
            if value is None:
                assert client.receive() is None
            else:
                assert_error(receive_last(client), value)


def test_idle_connection_is_closed_at_its_time_limit(tmp_path):
    """Before a request and after it; what a paused worker was sent is read first."""
    limits = time_limits(REQUEST_TIMEOUT=3600, FIRST_REQUEST=1, LINGER=1)
    conf = [*limits, 'keepalive = 1', 'worker_connections = 300']
    with Server(tmp_path, conf=conf) as server, ExitStack() as opened:
        began = time.monotonic()
        with server.connect() as silent, server.connect() as idle:
            assert idle.ask(PROBE).status == 200
            assert (silent.receive(), idle.receive()) == (None, None)
            assert time.monotonic() - began > 0.9
        clients = [opened.enter_context(server.connect()) for _ in range(300)]
        for client in clients:
            client.ask(PROBE)
        with paused(only_worker(server)):
            open_still = [client for client in clients if not client.is_readable()]
            for client in open_still:
                client.send(PROBE)
            time.sleep(1.5)
        assert all(client.receive() for client in open_still)
        assert 'Traceback' not in server.log


def test_waiting_for_the_store_delays_only_requests_to_it(impatient):
    """All are answered, also if the store takes longer than a request may."""
    assert impatient.ask(request(body=fern())).status == 200
    # More than a pool has threads.
    sent = [request(body=fern()) for _ in range(40)]
    sent += [request('GET', '/readyz')] * 40
    with ExitStack() as opened:
        clients = [opened.enter_context(impatient.connect()) for _ in sent]
        with locked(impatient.directory / 'plants.jsonl'):
            for client, data in zip(clients, sent, strict=True):
                client.send(data)
            began = time.monotonic()
            assert impatient.ask(request(authorization=None)).status == 401
            assert time.monotonic() - began < PATIENCE / 4
            assert not clients[0].is_readable(1.5)
            assert not any(client.is_readable() for client in clients)
        assert [client.receive().status for client in clients] == [200] * len(sent)


def test_slow_reader_gets_everything(impatient):
    """A client that reads a piece at a time gets it all, also after the time limit."""
    with impatient.connect() as client:
        whole, received = impatient.ask(LARGE).body, b''
        client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        client.send(LARGE)
        began = time.monotonic()
        while not received.endswith(whole):
            received += (piece := client._socket.recv(2**16))
            assert piece, 'closed'  # or it would be asked forever
            time.sleep(0.12)
        assert time.monotonic() - began > 2  # which is longer than it may pause


def test_refused_body_is_read_away_while_it_comes(measured):
    """A client that goes on to send is not cut off; when it pauses, it is."""
    with measured.connect() as client:
        refused = request(content_length=10**12, authorization=None)
        assert client.ask(refused).announces_close
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            client._socket.sendall(bytes(2**17))
            time.sleep(0.1)
        assert client._socket.recv(1) == b''
        open_sockets = count_sockets(measured)
        wait_until(lambda: count_sockets(measured) < open_sockets, 'it is closed')


ENDLESS = {
    request(body=b' ', content_length=10**15): bytes(2**20),
    CHUNKED: 7_000 * b'a\r\n          \r\n',
    CHUNKED + b'f' * 16 + b'\r\n': bytes(2**20),
}


def test_endless_body_is_refused_and_cut_off(impatient, secure):
    """It is refused at its limit and cut off in time, and delays no other client."""

    def flood(server, begin):
        piece = ENDLESS[begin]
        with server.connect() as client:
            client.send(begin + piece)
            assert_error(client.receive(), 40003)
            until = time.monotonic() + PATIENCE
            with suppress(BrokenPipeError, ConnectionResetError, SSLEOFError):
                while time.monotonic() < until:
                    client._socket.sendall(piece)
                pytest.fail('it is not cut off')

    with ThreadPoolExecutor() as pool, impatient.connect() as healthy:
        floods = [pool.submit(flood, impatient, begin) for begin in ENDLESS]
        floods.append(pool.submit(flood, secure, CHUNKED))
        while not all(each.done() for each in floods):
            assert_quick(healthy)
            time.sleep(0.02)
        for each in floods:
            each.result()


def test_pipelining_clients_delay_nobody(measured):
    """Of 150,000 requests of 300 clients an add waits for fewer than one of each."""
    log = measured.directory / 'server.log'
    for _ in range(3):  # this process may be paused until no client takes answers
        waits = []
        with ExitStack() as opened, measured.connect() as healthy:
            clients = [opened.enter_context(measured.connect()) for _ in range(300)]
            for client in clients:
                client.send(request('GET', '/x', authorization=None) * 500)
            assert all(client.is_readable(PATIENCE) for client in clients)
            for _ in range(100):  # the log is written in pieces of 100 lines
                before = log.stat().st_size
                assert_quick(healthy)
                waits.append(log.stat().st_size - before)
        if (found := sum(waits[50:])) > 0:  # the load lasts
            break
    line = re.search('.* /x .*', measured.log)[0]
    assert found > 0
    assert sorted(waits)[50] < (len(line) + 1) * len(clients)


def test_bodies_are_read_in_turns(measured):
    """Those that came first, of many chunks, delay no request on a new connection."""
    how = {'x_request_id': 'long', 'content_type': 'application/json'}
    body = chunked(end=b'1\r\n \r\n' * 65_000 + b'0\r\n\r\n', **how)
    quick = request('GET', '/x', authorization=None, x_request_id='quick')
    with ExitStack() as opened:
        with paused(only_worker(measured)):
            for data in [body] * 10 + [quick] * 60:
                opened.enter_context(measured.connect()).send(data)
        wait_until(lambda: measured.log.count(' long ') == 10, 'all are answered')
    assert measured.log.count(' quick ') == 60
    assert measured.log.rindex(' quick ') < measured.log.index(' long ')


# ---- places and files

# Clients that read no more, and ignore a close.
ABANDONED = [
    LARGE * 40,  # more than the kernel buffers at both ends, which is up to 36 MiB
    request(body=fern(), connection='close'),
    b'\r\n\r\n\r\n',
    NO_TOKEN,
]
RESETS = [b'', SLOW_HEAD, SLOW_BODY, request(body=fern()), NO_TOKEN, PROBE * 50, LARGE]


def test_abandoned_connection_is_closed(impatient):
    """No socket is left, also of clients that reset a connection at any moment."""
    before = count_sockets(impatient)
    for number, data in product(range(0, 40, 3), RESETS):
        client = impatient.connect()
        client.send(data)
        client.is_readable(number / 10_000)
        client.reset()
    with ExitStack() as opened:
        for data in ABANDONED * 5:
            client = opened.enter_context(impatient.connect())
            client.send(data)
            assert client.is_readable(PATIENCE)
        wait_until(lambda: count_sockets(impatient) <= before, 'they are closed')
    for word in ('ERROR', 'Traceback'):
        assert word not in impatient.log


def test_stalled_clients_make_room(tmp_path, subtests):
    """Those of a worker that could open few more files; the others are served."""
    limits = time_limits(FIRST_REQUEST=3600, REQUEST_TIMEOUT=3600, LINGER=0.2)
    conf = [*limits, 'keepalive = 3600', 'import resource']
    conf += ['resource.setrlimit(resource.RLIMIT_NOFILE, (52, 256))']
    with Server(tmp_path, conf=conf) as server:
        for data in PROBE, b'', SLOW_HEAD, SLOW_BODY, LARGE * 4:
            with subtests.test(data[:30]), ExitStack() as opened:
                for _ in range(25):
                    opened.enter_context(server.connect()).send(data)
                assert count_sockets(server) < 25  # the others wait
                for _ in range(3):
                    with server.connect() as healthy:
                        assert_quick(healthy)
        assert 'Too many' not in server.log


def test_full_worker_closes_idle_connections_first(tmp_path):
    """Then silent requests: of three one at a time, of two none, in any pause."""
    conf = [*time_limits(LINGER=1), 'keepalive = 3600', 'worker_connections = 3']
    with Server(tmp_path, conf=conf) as server, ExitStack() as opened:

        def is_closed(client):
            sending.send(b' ')
            return client.is_readable(0.01)

        def connect(data):
            client = opened.enter_context(server.connect())
            client.send(data)
            return client

        idle = connect(PROBE)
        assert idle.receive()
        begun = request(body=b' ', content_length='60000')
        sending, silent = connect(begun), connect(begun)
        idle.ask(PROBE)  # so that it was heard last
        wait_until(lambda: is_closed(idle), 'the idle one is closed')
        assert not silent.is_readable()
        connect(begun)
        wait_until(lambda: is_closed(silent), 'the silent one is closed')
        assert not sending.is_readable()


# ---- memory

LONG_HEAD = request(**{f'x-{n}': 'a' * 4_000 for n in range(7)}, content_length='60000')
WANTED = request(content_length='60000', content_type='application/json')
# With the memory that may come to it, in KiB.
WITHHELD = {
    b'': 48,
    PROBE: 48,
    LONG_HEAD[:-2]: 28 + 102,
    WANTED + b' ' * 59_000: 58 + 102,
    request(content_length='1000000') + b' ' * 900_000: 48,
}


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """A server without time limits, whose costs are measured."""
    directory = tmp_path_factory.mktemp('measured')
    limits = time_limits(FIRST_REQUEST=3600, REQUEST_TIMEOUT=3600)
    how = {'conf': limits, 'COVERAGE_PROCESS_CONFIG': None}  # which costs, too
    with Server(directory, '--keep-alive=3600', **how) as server:
        for _ in range(20):  # the first requests load code
            assert server.ask(request(body=fern())).status == 200
            assert server.ask(request('GET', '/x', authorization=None)).status == 401
        yield server


def unread_bytes(server):
    """Return how many bytes of requests the largest queue holds."""
    queue = rf'(?m)^ *\d+: \S+:{server.port:04X} \S+ 01 \S+:(\S+)'
    sizes = re.findall(queue, Path('/proc/net/tcp').read_text())
    return max(int(size, 16) for size in sizes)


def test_strangers_take_little_memory(measured, subtests):
    """Little more than the bytes that are used."""
    number, pid = 100, only_worker(measured)
    with ExitStack() as opened:
        # All connections stay open: memory of one that ends would be used again.
        for data, most in WITHHELD.items():
            before = kib('Pss_Anon', pid)
            for _ in range(number):
                opened.enter_context(measured.connect()).send(data)
            wait_until(lambda: unread_bytes(measured) == 0, 'it is received')
            grown = (kib('Pss_Anon', pid) - before) / number
            with subtests.test(data[-30:]):
                assert grown < most, f'{grown:.1f} KiB'
