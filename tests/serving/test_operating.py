"""What an operator does to a server at work, and what hostile clients do to it."""

import itertools
import os
import re
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path

import pytest
from server import GUNICORN
from server import PATIENCE
from server import SCRIPTS
from server import RawClient
from server import Server
from server import configured
from server import is_alive
from server import request
from server import wait_until

ids = itertools.count(1)


def fern():
    """Return a plant that no other test adds."""
    return {'id': next(ids), 'name': 'Fern'}


# ---- signals under load


class Load:
    """Clients that add plants, each in its way, and note every request that fails.

    Some *keep* a connection and send one request after another, some *pause* between
    them, so that the connection idles, and some open a *fresh* one for each request.

    Args:
        server: Where they go.

    Attributes:
        added: The plants that were answered with 200.
        lost: Those that were answered by the end of a connection, or not at all.
        refused: Those for which there was no connection.
    """

    CLIENTS = ('keep', 'fresh', 'pause') * 4

    def __init__(self, server):
        self._port = server.port
        self._done = threading.Event()
        self.added = []
        self.lost = []
        self.refused = []

    @contextmanager
    def running(self):
        with ThreadPoolExecutor(len(self.CLIENTS)) as pool:
            clients = [pool.submit(getattr(self, f'_{way}')) for way in self.CLIENTS]
            try:
                self.go_on()
                yield
            finally:
                self._done.set()
            for client in clients:
                client.result()

    def go_on(self):
        """Wait until some more plants are added."""
        wanted = len(self.added) + 200
        wait_until(lambda: len(self.added) >= wanted, 'the load goes on')

    def _keep(self, pause=0.0, connection='keep-alive'):
        while not self._done.is_set():
            plant = fern()
            try:
                client = RawClient(self._port)
            except ConnectionError:  # the socket may close just then
                self.refused.append(plant)
                self._done.wait(0.01)
                continue
            with client:
                while self._add(client, plant, connection) and not self._done.is_set():
                    self._done.wait(pause)
                    plant = fern()

    def _pause(self):
        self._keep(pause=0.02)

    def _fresh(self):
        self._keep(connection='close')

    def _add(self, client, plant, connection):
        answer = None
        with suppress(ConnectionError):  # cut off in the middle of the answer
            answer = client.ask(request(body=plant, connection=connection))
        if answer is None:
            self.lost.append(plant)
            return False
        assert answer.status == 200, answer
        self.added.append(plant)
        return not answer.announces_close


def assert_all_stored(server, load):
    """What was answered with 200 is stored, and once, and nothing looks unusual."""
    stored = Counter(plant['id'] for plant in server.plants())
    assert set(stored.values()) == {1}
    assert {plant['id'] for plant in load.added} <= stored.keys()
    assert 'Traceback' not in server.log
    assert 'ERROR' not in server.log


def reload(server, load):
    """SIGHUP, twice."""
    for _ in range(2):
        old = server.worker_pids()
        server.signal(signal.SIGHUP)
        wait_until(lambda old=old: not old & server.worker_pids(), 'all are replaced')
        load.go_on()
    assert len(server.worker_pids()) == 2


def scale(server, load):
    """SIGTTIN and SIGTTOU, up to four workers and down to one."""
    for number, workers in (
        (signal.SIGTTIN, 3),
        (signal.SIGTTIN, 4),
        (signal.SIGTTOU, 3),
        (signal.SIGTTOU, 2),
        (signal.SIGTTOU, 1),
    ):
        server.signal(number)
        wait_until(lambda n=workers: len(server.worker_pids()) == n, f'{workers} run')
        load.go_on()


def recycle(server, load):
    """--max-requests, until every worker was replaced several times."""
    wait_until(lambda: server.log.count('Booting worker') > 10, 'they are replaced')


@contextmanager
def upgraded(server):
    """SIGUSR2: a second master beside the first, with workers of its own."""
    server.signal(signal.SIGUSR2)
    wait_until(lambda: server.log.count('Listening at') == 2, 'there are two masters')
    new = int(re.findall(r'Listening at: \S+ \((\d+)\)', server.log)[1])
    try:
        wait_until(lambda: len(server.worker_pids()) == 4, 'both have workers')
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(new, signal.SIGTERM)
        wait_until(lambda: not is_alive(new), 'the new one ends')


OPERATIONS = {
    'SIGHUP': (reload, []),
    'SIGTTIN and SIGTTOU': (scale, []),
    'max_requests': (recycle, ['--max-requests=50', '--max-requests-jitter=20']),
}


@pytest.mark.parametrize(
    ('operate', 'arguments'), OPERATIONS.values(), ids=OPERATIONS.keys()
)
def test_no_request_fails(tmp_path, operate, arguments):
    """Workers come and go, and every request is answered, on whatever connection."""
    with Server(tmp_path, *arguments, workers=2) as server:
        load = Load(server)
        with load.running():
            operate(server, load)
        assert not load.lost
        assert not load.refused
        assert_all_stored(server, load)
        assert len(server.plants()) == len(load.added)


COMMANDS = {
    'gunicorn': [SCRIPTS / 'gunicorn', *GUNICORN[3:]],
    'python -m gunicorn': GUNICORN,
}


@pytest.mark.parametrize('command', COMMANDS.values(), ids=COMMANDS)
def test_upgrade(tmp_path, command):
    """SIGUSR2, then SIGTERM to the old master: every request is answered."""
    with Server(tmp_path, command=command, workers=2) as server:
        load = Load(server)
        with upgraded(server):
            with load.running():
                server.signal(signal.SIGTERM)
                assert server.wait() == 0
                load.go_on()
            assert not load.lost
            assert not load.refused
            assert_all_stored(server, load)
            assert len(server.plants()) == len(load.added)


def test_upgrade_at_once(tmp_path):
    """SIGQUIT to the old master cuts off what it does, and nothing after that."""
    with Server(tmp_path, workers=2) as server:
        load = Load(server)
        with upgraded(server):
            with load.running():
                server.signal(signal.SIGQUIT)
                assert server.wait(5) == 0
                cut = len(load.lost)
                load.go_on()
            assert cut <= len(load.lost) <= len(load.CLIENTS)
            assert not load.refused
            assert_all_stored(server, load)


def test_stop(tmp_path):
    """SIGTERM: what a worker has taken is answered, what none has taken is refused."""
    with Server(tmp_path, workers=2) as server:
        load = Load(server)
        with load.running():
            server.signal(signal.SIGTERM)
            assert server.wait(5) == 0
        # A connection that waited for a worker is cut off unread: nothing is stored.
        assert_all_stored(server, load)
        assert len(server.plants()) == len(load.added)


def test_idle_connections_at_a_reload(tmp_path):
    """A kept connection that idles is answered once more, or is seen to be closed."""
    with Server(tmp_path, workers=2) as server, ExitStack() as connections:
        clients = [connections.enter_context(server.connect()) for _ in range(20)]
        for client in clients:
            assert client.ask(request(body=fern())).status == 200
        server.signal(signal.SIGHUP)
        wait_until(lambda: 'Handling signal: hup' in server.log, 'it reloads')
        for client in clients[:10]:
            answer = client.ask(request(body=fern()))
            assert answer.status == 200
        for client in clients[10:]:
            assert client.is_readable(10)
            assert client.receive() is None


EARLY = """
import time
after_fork = post_fork

def post_fork(server, worker):
    while server.SIG_QUEUE.empty():
        time.sleep(0.01)
    after_fork(server, worker)
"""


def test_stop_while_a_worker_starts(tmp_path):
    """A worker that has no signal handlers yet stops with the others, at once."""
    server = Server(tmp_path, *configured(tmp_path, EARLY))
    server.start()
    try:
        wait_until(lambda: 'Booting worker' in server.log, 'the worker is forked')
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 0
    finally:
        server.stop()


# ---- hostile clients


@pytest.fixture
def server(tmp_path):
    """The service with two workers."""
    with Server(tmp_path, workers=2) as server:
        yield server


def test_hanging_clients(server):
    """With 200 heads and 200 bodies that do not end, others are answered as before."""
    before = server.memory()
    with ExitStack() as connections:
        slow = [connections.enter_context(server.connect()) for _ in range(400)]
        for client in slow[::2]:
            client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
        for client in slow[1::2]:
            client.send(request(body=b' ', content_length='1000'))
        for _ in range(20):
            for client in slow:
                client.send(b' ')
            assert server.ask(request(body=fern())).status == 200
        assert not any(client.is_readable() for client in slow)
        assert server.memory() - before < 64
    workers = server.worker_pids()
    assert server.ask(request(body=fern())).status == 200
    assert server.worker_pids() == workers


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


def test_more_connections_than_files(tmp_path):
    """A worker that may open no more files lives on, and serves when it may again."""
    command = ['bash', '-c', 'ulimit -n 64; exec "$@"', 'limited', *GUNICORN]
    with Server(tmp_path, command=command) as server:
        [worker] = server.worker_pids()
        with ExitStack() as connections:
            for _ in range(100):
                client = connections.enter_context(server.connect())
                client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
            open_files = Path(f'/proc/{worker}/fd')
            wait_until(lambda: len(list(open_files.iterdir())) >= 60, 'all are open')
            assert not client.is_readable(0.3)
        assert server.ask(request(body=fern())).status == 200
        assert server.worker_pids() == {worker}


def test_files_are_not_short(server):
    """Workers may have as many files open as the system lets them."""
    for pid in server.worker_pids():
        limits = Path(f'/proc/{pid}/limits').read_text()
        [(soft, hard)] = re.findall(
            r'^Max open files +(\d+) +(\d+)', limits, re.MULTILINE
        )
        assert soft == hard


ENDLESS = {
    'length': (request(body=b' ', content_length=str(10**10)), b' ' * 65_536),
    'chunks': (
        request(body=b'', content_type='application/json', transfer_encoding='chunked'),
        b'10000\r\n' + b' ' * 65_536 + b'\r\n',
    ),
}


@pytest.mark.parametrize(('head', 'piece'), ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_body(server, head, piece):
    """A body of 10 GB, or without end, is refused at once and not read."""
    connected = socket.create_connection(('127.0.0.1', server.port), PATIENCE)
    with RawClient(over=connected) as client:
        client.send(head + piece + piece)
        answer = client.receive()
        assert (answer.status, answer.json['error']) == (400, 40003)
        assert answer.announces_close
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2**28:
                connected.sendall(piece)
                sent += len(piece)
    # What fits into the buffers between the two.
    assert sent < 2**24
