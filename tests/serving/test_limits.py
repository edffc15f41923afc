"""Hostile clients: each has its time and its share, and holds up nobody else."""

import os
import re
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextlib import suppress
from pathlib import Path

import pytest
from exchange import PAGE
from exchange import QUICK
from exchange import SHORT
from exchange import TAKEN
from exchange import assert_error
from exchange import assert_quick
from exchange import chunked
from exchange import fern
from exchange import table
from server import GUNICORN
from server import PATIENCE
from server import Server
from server import configured
from server import request
from server import wait_until

STRANGER = request('GET', '/x', authorization=None)


@pytest.fixture(scope='module')
def impatient(tmp_path_factory):
    """The service with more time for an idle client than for a request."""
    directory = tmp_path_factory.mktemp('impatient')
    with Server(directory, *configured(directory, *SHORT)) as server:
        yield server


def worker_of(server):
    """Return the only worker."""
    (pid,) = server.worker_pids()
    return pid


def connections_of(server):
    """Return how many sockets the only worker has open."""
    names = []
    for entry in Path(f'/proc/{worker_of(server)}/fd').iterdir():
        with suppress(FileNotFoundError):  # it was closed in between
            names.append(os.readlink(entry))
    return sum(name.startswith('socket:') for name in names)


# ---- time


COMPLETE = request('GET', '/livez')
DRIPPING = {
    'head': (b'', b'POST /plants HTTP/1.1\r\nX-Slow: ', None),
    'body': (b'', request(body=b' ', content_length='1000'), 40000),
    'chunks': (b'', chunked(b' ', end=b'ff\r\n'), 40000),
    'trailers': (b'', chunked(b' ', end=b'0\r\nX: '), 40000),
    'head behind another request': (COMPLETE, request()[:40], None),
    'body behind another request': (
        COMPLETE,
        request(body=b' ', content_length='1000'),
        40000,
    ),
}


@table('before, data, value', DRIPPING)
def test_request_that_drips_is_ended_in_time(impatient, before, data, value):
    """A request that is not complete in its time ends, whatever came before it."""
    with impatient.connect() as client:
        client.send(before + data)
        if before:
            assert client.receive().status == 200
        began = time.monotonic()

        def ended():
            if not before:  # what came with another request has its time from there on
                client.send(b' ')
            return client.is_readable(0.02)

        wait_until(ended, 'it is ended', 5)
        # Not the three seconds of an idle client.
        assert 0.5 < time.monotonic() - began < 2.8
        answer = client.receive()
        if value is None:
            assert answer is None
        else:
            assert_error(answer, value)
            assert answer.announces_close
            assert client.receive() is None


def test_request_has_its_whole_time_behind_another(impatient):
    """A request that begins on a kept connection has the time of a first one."""
    with impatient.connect() as client:
        for _ in range(3):
            time.sleep(0.7)
            assert client.ask(COMPLETE).status == 200


def test_idle_client_has_the_time_of_an_idle_client(impatient):
    """A kept connection that sends nothing is closed, not before its time."""
    with impatient.connect() as client:
        assert client.ask(COMPLETE).status == 200
        assert not client.is_readable(2)
        assert client.is_readable(5)
        assert client.receive() is None


def test_first_request_may_come_late(tmp_path):
    """A new connection has its time for a first request, also if none is kept."""
    with Server(tmp_path, '--keep-alive=0') as server, server.connect() as client:
        time.sleep(1.5)  # the worker looks every second
        assert client.ask(COMPLETE).status == 200


@pytest.mark.parametrize('reads', ['nothing', 'a little'])
def test_reader_that_stalls_loses_its_connection(impatient, reads):
    """A client whose buffers are full when its time is up does not keep its place."""
    before = connections_of(impatient)
    with ExitStack() as opened:
        clients = []
        for _ in range(5):
            client = opened.enter_context(impatient.connect())
            client.send(request('GET', PAGE) * 20)
            clients.append(client)
        if reads == 'a little':
            for client in clients:
                assert len(client.receive().body) > 2**20
        wait_until(lambda: connections_of(impatient) <= before, 'they are closed', 8)
    assert impatient.ask(COMPLETE).status == 200


def test_reader_that_is_slow_gets_everything(impatient):
    """A client that takes longer than a request may, a piece at a time, gets it all."""
    whole = impatient.ask(request('GET', PAGE)).body
    with impatient.connect() as client:
        client.send(request('GET', PAGE) * 3)
        received = b''
        while len(received) < 3 * len(whole):
            received += client._socket.recv(2**19)
            time.sleep(0.15)
        assert received.count(whole) == 3


def test_urgent_data_loses_nothing(service):
    """A byte out of band, which nobody reads, does not stop what follows it."""
    with service.connect() as client:
        data = request(body=fern())
        for place in (0, 10, len(data) - 3):
            client.send(data[:place])
            client._socket.send(b'!', socket.MSG_OOB)
            time.sleep(0.05)
            client.send(data[place:])
            assert client.receive().status == 200


# ---- closing


@pytest.mark.parametrize('megabytes', [5, 50])
@pytest.mark.parametrize('framing', ['length', 'chunks'])
def test_large_body_is_answered_to_who_sends_it_all(service, megabytes, framing):
    """A client that reads after it has sent its whole body finds its 40003."""
    body = b' ' * (megabytes * 2**20)
    with service.connect() as client:
        if framing == 'length':
            client._socket.sendall(request(body=body))
        else:
            client._socket.sendall(chunked(body, content_type='application/json'))
        answer = client.receive()
        assert_error(answer, 40003)
        assert answer.announces_close
        assert client.receive() is None


ENDLESS = {
    'length': (request(body=b' ', content_length=str(10**12)), b' ' * 65_536),
    'chunks': (
        request(content_type='application/json', transfer_encoding='chunked'),
        b'10000\r\n' + b' ' * 65_536 + b'\r\n',
    ),
}


@table('head, piece', ENDLESS)
def test_endless_body_is_answered_at_once_and_ends(impatient, head, piece):
    """It is refused as soon as it is too long, ends in time and slows nobody down."""
    with impatient.connect() as client:
        client.send(head + piece + piece)
        assert client.is_readable(QUICK)
        answer = client.receive()
        assert_error(answer, 40003)
        assert answer.announces_close
        done = threading.Event()

        def pour():
            with suppress(OSError):
                while not done.is_set():
                    client._socket.sendall(piece)

        with ThreadPoolExecutor(1) as pool:
            poured = pool.submit(pour)
            try:
                assert_quick(impatient, rounds=5)
                poured.result(8)  # a second for a request, and one to look again
            finally:
                done.set()


LINGERING = {
    'connection: close': request(body=TAKEN, connection='close'),
    'not HTTP': b'\r\n\r\n\r\n',
    'refused body': request(body=b'a' * 70_000, authorization=None),
}


@pytest.mark.parametrize('data', LINGERING.values(), ids=LINGERING)
def test_client_that_does_not_close_is_closed(impatient, data):
    """A client that keeps its end open after an announced close loses its place."""
    before = connections_of(impatient)
    with ExitStack() as opened:
        for _ in range(8):
            client = opened.enter_context(impatient.connect())
            assert client.ask(data).announces_close
        assert_quick(impatient, rounds=1)
        wait_until(lambda: connections_of(impatient) <= before, 'they are closed', 8)


# ---- turns


def pipelining(server, opened, number, seconds):
    """Have strangers send requests without a pause and read the answers."""
    sockets = []
    for _ in range(number):
        client = opened.enter_context(server.connect())
        client._socket.setblocking(False)
        sockets.append(client._socket)
    data = STRANGER * 50
    selector = select.epoll()
    opened.callback(selector.close)
    by_fd = {one.fileno(): one for one in sockets}
    for number in by_fd:
        selector.register(number, select.EPOLLIN | select.EPOLLOUT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for number, events in selector.poll(0.1):
            with suppress(BlockingIOError, ConnectionError):
                if events & select.EPOLLIN:
                    by_fd[number].recv(2**18)
                if events & select.EPOLLOUT:
                    by_fd[number].send(data)


def test_strangers_that_pipeline_slow_nobody_down(tmp_path):
    """Adds of a healthy client are answered meanwhile, and no heartbeat stops."""
    unmeasured = {'COVERAGE_PROCESS_CONFIG': None}
    with Server(tmp_path, '--timeout=2', **unmeasured) as server, ExitStack() as opened:
        pid = worker_of(server)
        with ThreadPoolExecutor(1) as pool, server.connect() as healthy:
            crowd = pool.submit(pipelining, server, opened, 900, 4)
            slowest = 0
            while not crowd.done():
                began = time.monotonic()
                assert healthy.ask(request(body=fern())).status == 200
                slowest = max(slowest, time.monotonic() - began)
            crowd.result()
        assert slowest < 2 * QUICK
        assert worker_of(server) == pid
        assert 'WORKER TIMEOUT' not in server.log


def test_slow_clients_hold_up_nobody(service):
    """With 400 heads and bodies that do not end, others are answered as before."""
    before = service.memory()
    workers = service.worker_pids()
    with ExitStack() as opened:
        clients = [opened.enter_context(service.connect()) for _ in range(400)]
        for client in clients[::2]:
            client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
        for client in clients[1::2]:
            client.send(request(body=b' ', content_length='1000'))

        def drip():
            for client in clients:
                client.send(b' ')

        assert_quick(service, between=drip)
        assert not any(client.is_readable() for client in clients)
        assert service.memory() - before < 64
    assert service.worker_pids() == workers


# ---- memory, connections, files


def test_unfinished_heads_cost_some_kilobytes(tmp_path):
    """A stranger who sends almost all of a large head fills no memory."""
    fields = ''.join(f'x{number}: {"a" * 8_000}\r\n' for number in range(98))
    with (
        Server(tmp_path, COVERAGE_PROCESS_CONFIG=None) as server,
        ExitStack() as opened,
    ):
        before = server.memory()
        for size in (28_000, len(fields)):
            for _ in range(150):
                client = opened.enter_context(server.connect())
                client.send(f'GET / HTTP/1.1\r\n{fields}'.encode()[:size])
        assert_quick(server, rounds=3)
        grown = server.memory() - before
        # 150 that wait with 28 kB, and 150 that were refused at 32.
        assert grown < 300 * 0.1, f'{grown:.1f} MiB'


@pytest.mark.parametrize(('clients', 'requests'), [(1, 150), (60, 3)])
def test_answers_that_nobody_takes_fill_no_memory(tmp_path, clients, requests):
    """Large answers to clients that do not read wait in the sockets."""
    with Server(tmp_path) as server, ExitStack() as opened:
        server.ask(request('GET', PAGE))
        before = server.memory()
        for _ in range(clients):
            client = opened.enter_context(server.connect())
            client.send(request('GET', PAGE) * requests)
            assert client.is_readable(PATIENCE)
        assert_quick(server, rounds=3)
        assert server.memory() < before + 20


def test_connections_are_bounded(tmp_path):
    """Above --worker-connections a connection waits until another one ends."""
    with Server(tmp_path, '--worker-connections=20') as server:
        with ExitStack() as connections:
            for _ in range(20):
                client = connections.enter_context(server.connect())
                client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
            waiting = server.connect()
            waiting.send(request(body=fern()))
            assert not waiting.is_readable(0.3)
        with waiting:
            assert waiting.receive().status == 200


def test_more_connections_than_files_wait(tmp_path):
    """A worker that may open no more files lives on, and serves when it may again."""
    command = ['bash', '-c', 'ulimit -n 64; exec "$@"', 'limited', *GUNICORN]
    with Server(tmp_path, command=command) as server:
        pid = worker_of(server)
        with ExitStack() as connections:
            for _ in range(100):
                client = connections.enter_context(server.connect())
                client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
            open_files = Path(f'/proc/{pid}/fd')
            wait_until(lambda: len(list(open_files.iterdir())) >= 60, 'all are open')
            assert not client.is_readable(0.3)
        assert server.ask(request(body=fern())).status == 200
        assert worker_of(server) == pid
        assert 'Traceback' not in server.log


def test_files_are_not_short(service):
    """Workers may have as many files open as the system lets them."""
    for pid in service.worker_pids():
        limits = Path(f'/proc/{pid}/limits').read_text()
        [(soft, hard)] = re.findall(
            r'^Max open files +(\d+) +(\d+)', limits, re.MULTILINE
        )
        assert soft == hard


def test_reader_that_leaves_leaves_nothing_behind(impatient):
    """A client that goes away in the middle of its answer leaves no socket."""
    before = connections_of(impatient)
    for _ in range(20):
        with impatient.connect() as client:
            client.send(request('GET', PAGE) * 3)
            assert client.is_readable(PATIENCE)
    assert_quick(impatient, rounds=1)
    wait_until(lambda: connections_of(impatient) <= before, 'they are closed')
    assert 'ERROR' not in impatient.log
