"""Slow and hostile clients are limited, and delay no other client."""

import fcntl
import os
import re
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from exchange import (
    LARGE_FILE,
    MAX_ANSWER_SECONDS,
    SHORT_LIMITS,
    STORED_PLANT,
    assert_error,
    assert_quick,
    chunked,
    fern,
    table,
)
from server import GUNICORN, PATIENCE, Server, configured, request, wait_until

UNAUTHORIZED = request('GET', '/x', authorization=None)


@pytest.fixture(scope='module')
def impatient(tmp_path_factory):
    """A server with 1 s for a request and 3 s for an idle connection."""
    directory = tmp_path_factory.mktemp('impatient')
    with Server(directory, *configured(directory, *SHORT_LIMITS)) as server:
        yield server


def only_worker(server):
    """Return the process id of the only worker."""
    (pid,) = server.worker_pids()
    return pid


def count_sockets(server):
    """Return how many sockets the only worker has open."""
    names = []
    for entry in Path(f'/proc/{only_worker(server)}/fd').iterdir():
        with suppress(FileNotFoundError):  # it was closed in between
            names.append(os.readlink(entry))
    return sum(name.startswith('socket:') for name in names)


# ---- time


PROBE = request('GET', '/livez')
INCOMPLETE = {
    'head': (b'', b'POST /plants HTTP/1.1\r\nX-Slow: ', None),
    'body': (b'', request(body=b' ', content_length='1000'), 40000),
    'chunks': (b'', chunked(b' ', end=b'ff\r\n'), 40000),
    'trailers': (b'', chunked(b' ', end=b'0\r\nX: '), 40000),
    'head behind another request': (PROBE, request()[:40], None),
    'body behind another request': (
        PROBE,
        request(body=b' ', content_length='1000'),
        40000,
    ),
}


@table('before, data, value', INCOMPLETE)
def test_incomplete_request_is_ended_at_its_time_limit(impatient, before, data, value):
    """An incomplete request is ended at its time limit, also behind another request."""
    with impatient.connect() as client:
        client.send(before + data)
        if before:
            assert client.receive().status == 200
        began = time.monotonic()

        def ended():
            if not before:  # behind another request the time runs without more bytes
                client.send(b' ')
            return client.is_readable(0.02)

        wait_until(ended, 'the request is ended', 5)
        # The request limit of 1 s counts, not the idle limit of 3 s.
        assert 0.5 < time.monotonic() - began < 2.8
        answer = client.receive()
        if value is None:
            assert answer is None
        else:
            assert_error(answer, value)
            assert answer.announces_close
            assert client.receive() is None


def test_each_request_of_a_connection_has_its_own_time_limit(impatient):
    """The time limit of a request begins with that request."""
    with impatient.connect() as client:
        for _ in range(3):
            time.sleep(0.7)
            assert client.ask(PROBE).status == 200


def test_idle_connection_is_closed_at_its_time_limit(impatient):
    """A kept connection without a request is closed at the idle limit, not before."""
    with impatient.connect() as client:
        assert client.ask(PROBE).status == 200
        assert not client.is_readable(2)
        assert client.is_readable(5)
        assert client.receive() is None


def test_request_that_waits_for_its_time_limit_is_answered(impatient):
    """If the store takes longer than a request may, the answer tells what follows."""
    plants = impatient.directory / 'plants.jsonl'
    assert impatient.ask(request(body=fern())).status == 200
    with impatient.connect() as client:
        with plants.open('rb') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            client.send(request(body=fern()))
            # The worker looks once a second for clients whose time is up.
            assert not client.is_readable(2.5)
        answer = client.receive()
        assert answer.status == 200
        assert answer.announces_close


def test_request_sent_to_a_paused_worker_is_answered(tmp_path):
    """A worker that is paused for longer than its limits first hears its clients."""
    with Server(tmp_path, '--keep-alive=1') as server, server.connect() as client:
        assert client.ask(PROBE).status == 200
        os.kill(only_worker(server), signal.SIGSTOP)
        client.send(request(body=fern()))
        assert not client.is_readable(2.5)
        os.kill(only_worker(server), signal.SIGCONT)
        assert client.receive().status == 200


def test_first_request_may_come_late(tmp_path):
    """A new connection may wait with its first request, also with --keep-alive=0."""
    with Server(tmp_path, '--keep-alive=0') as server, server.connect() as client:
        time.sleep(1.5)  # the worker checks time limits every second
        assert client.ask(PROBE).status == 200


@pytest.mark.parametrize('reads', ['nothing', 'a little'])
def test_client_that_stops_reading_is_disconnected(impatient, reads):
    """A client that does not read its answers is disconnected at its time limit."""
    before = count_sockets(impatient)
    with ExitStack() as opened:
        clients = []
        for _ in range(5):
            client = opened.enter_context(impatient.connect())
            client.send(request('GET', LARGE_FILE) * 20)
            clients.append(client)
        if reads == 'a little':
            for client in clients:
                assert len(client.receive().body) > 2**20
        wait_until(lambda: count_sockets(impatient) <= before, 'they are closed', 8)
    assert impatient.ask(PROBE).status == 200


def test_slow_reader_gets_everything(impatient):
    """A client that reads a piece at a time gets it all, also after the time limit."""
    whole = impatient.ask(request('GET', LARGE_FILE)).body
    with impatient.connect() as client:
        client.send(request('GET', LARGE_FILE) * 3)
        received = b''
        while len(received) < 3 * len(whole):
            received += client._socket.recv(2**19)
            time.sleep(0.15)
        assert received.count(whole) == 3


def test_urgent_data_does_not_disturb_a_request(service):
    """A byte of TCP urgent data, which the server ignores, does not stop a request."""
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
def test_client_that_sends_all_of_a_large_body_is_answered(service, megabytes, framing):
    """A client that reads only after its whole body was sent gets its 40003."""
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
def test_endless_body_is_refused_at_once_and_cut_off(impatient, head, piece):
    """An endless body is refused at the limit, cut off in time, and delays nobody."""
    with impatient.connect() as client:
        client.send(head + piece + piece)
        assert client.is_readable(MAX_ANSWER_SECONDS)
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
                poured.result(8)  # 1 s for the request, and 1 s until the worker checks
            finally:
                done.set()


LINGERING = {
    'connection: close': request(body=STORED_PLANT, connection='close'),
    'not HTTP': b'\r\n\r\n\r\n',
    'refused body': request(body=b'a' * 70_000, authorization=None),
}


@pytest.mark.parametrize('data', LINGERING.values(), ids=LINGERING)
def test_connection_that_the_client_leaves_open_is_closed(impatient, data):
    """After an announced close the server closes what the client leaves open."""
    before = count_sockets(impatient)
    with ExitStack() as opened:
        for _ in range(8):
            client = opened.enter_context(impatient.connect())
            assert client.ask(data).announces_close
        assert_quick(impatient, rounds=1)
        wait_until(lambda: count_sockets(impatient) <= before, 'they are closed', 8)


# ---- turns


def send_pipelines(server, opened, number, seconds):
    """Let clients without a token pipeline requests without a pause."""
    data = UNAUTHORIZED * 50
    selector = select.epoll()
    opened.callback(selector.close)
    sockets = {}
    for _ in range(number):
        client = opened.enter_context(server.connect())
        client._socket.setblocking(False)
        fd = client._socket.fileno()
        sockets[fd] = client._socket
        selector.register(fd, select.EPOLLIN | select.EPOLLOUT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for fd, events in selector.poll(0.1):
            with suppress(BlockingIOError, ConnectionError):
                if events & select.EPOLLIN:
                    sockets[fd].recv(2**18)
                if events & select.EPOLLOUT:
                    sockets[fd].send(data)


def test_pipelining_clients_delay_nobody(tmp_path):
    """While 900 clients pipeline, adds of another are answered and heartbeats sent."""
    unmeasured = {'COVERAGE_PROCESS_CONFIG': None}
    with Server(tmp_path, '--timeout=2', **unmeasured) as server, ExitStack() as opened:
        pid = only_worker(server)
        with ThreadPoolExecutor(1) as pool, server.connect() as healthy:
            crowd = pool.submit(send_pipelines, server, opened, 900, 3)
            slowest = 0
            while not crowd.done():
                began = time.monotonic()
                assert healthy.ask(request(body=fern())).status == 200
                slowest = max(slowest, time.monotonic() - began)
            crowd.result()
        assert slowest < 2 * MAX_ANSWER_SECONDS
        assert only_worker(server) == pid
        assert 'WORKER TIMEOUT' not in server.log


def test_slow_clients_delay_nobody(service):
    """With 400 unfinished heads and bodies, other clients are answered quickly."""
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


def test_unfinished_head_uses_little_memory(tmp_path):
    """A client that sends almost all of a large head costs at most 0.1 MiB."""
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
        # 150 heads of 28 kB are incomplete, and 150 were refused at 32 kB.
        assert grown < 300 * 0.1, f'{grown:.1f} MiB'


@pytest.mark.parametrize(('clients', 'requests'), [(1, 150), (60, 3)])
def test_unread_answers_use_little_memory(tmp_path, clients, requests):
    """Large answers to clients that do not read stay in the buffers of the sockets."""
    with Server(tmp_path) as server, ExitStack() as opened:
        server.ask(request('GET', LARGE_FILE))
        before = server.memory()
        for _ in range(clients):
            client = opened.enter_context(server.connect())
            client.send(request('GET', LARGE_FILE) * requests)
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


def test_connections_above_the_file_limit_wait(tmp_path):
    """A worker at its file limit survives, and serves again when files are closed."""
    command = ['bash', '-c', 'ulimit -n 64; exec "$@"', 'limited', *GUNICORN]
    with Server(tmp_path, command=command) as server:
        pid = only_worker(server)
        with ExitStack() as connections:
            for _ in range(100):
                client = connections.enter_context(server.connect())
                client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
            open_files = Path(f'/proc/{pid}/fd')
            wait_until(lambda: len(list(open_files.iterdir())) >= 60, 'all are open')
            assert not client.is_readable(0.3)
        assert server.ask(request(body=fern())).status == 200
        assert only_worker(server) == pid
        assert 'Traceback' not in server.log


def test_workers_raise_their_file_limit(service):
    """The soft limit of open files of a worker is the hard limit."""
    for pid in service.worker_pids():
        limits = Path(f'/proc/{pid}/limits').read_text()
        [(soft, hard)] = re.findall(
            r'^Max open files +(\d+) +(\d+)', limits, re.MULTILINE
        )
        assert soft == hard


def test_client_that_disconnects_leaves_no_socket(impatient):
    """A client that disconnects in the middle of its answer leaves no open socket."""
    before = count_sockets(impatient)
    for _ in range(20):
        with impatient.connect() as client:
            client.send(request('GET', LARGE_FILE) * 3)
            assert client.is_readable(PATIENCE)
    assert_quick(impatient, rounds=1)
    wait_until(lambda: count_sockets(impatient) <= before, 'they are closed')
    assert 'ERROR' not in impatient.log
