"""The worker: one thread serves all clients, so nothing may hold it up."""

import fcntl
import os
import threading
import time
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path

import pytest
from proxy import Proxy
from server import Server
from server import hurried
from server import request
from server import wait_until

CROWD = 40  # more than the worker has threads for what blocks
PROMPT = 2  # seconds that an answer may take on a crowded machine


@pytest.fixture(params=['adds first', 'probes first'])
def asked(request):
    """Return a function that asks for much, and returns who waits for an answer."""

    def ask(server, opened):
        kinds = [[adding(id) for id in range(CROWD)], [probing()] * CROWD]
        if request.param == 'probes first':
            kinds.reverse()
        clients = []
        for data in kinds[0] + kinds[1]:
            clients.append(opened.enter_context(server.connect()))
            clients[-1].send(data)
        return clients

    return ask


def adding(id):
    """Return a request that adds a plant."""
    return request(body={'id': id, 'name': 'Fern'})


def probing():
    """Return a request that asks whether an add would work."""
    return request('GET', '/readyz')


def assert_prompt(server):
    """Check that others are served."""
    for _ in range(5):
        began = time.monotonic()
        assert server.ask(request('GET', '/livez')).status == 200
        assert server.ask(request(authorization=None)).status == 401
        assert time.monotonic() - began < PROMPT


def threads(server):
    """Return how many threads the only worker has."""
    (pid,) = server.worker_pids()
    return len(list(Path(f'/proc/{pid}/task').iterdir()))


@contextmanager
def locked(path):
    """Hold the lock of a plant file, as a process does that builds its index."""
    with path.open('rb') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_file_that_is_locked(tmp_path, asked):
    """While another process has the file, everything else is served."""
    with ExitStack() as opened, Server(tmp_path) as server:
        assert server.ask(adding(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            clients = asked(server, opened)
            assert_prompt(server)
            assert not any(client.is_readable() for client in clients)
            assert threads(server) <= 20
        assert [client.receive().status for client in clients] == [200] * len(clients)
        assert len(server.lines()) == CROWD + 1


def test_interrupt_while_the_file_is_locked(tmp_path):
    """Ctrl-C ends the server also while an add waits for the file."""
    with Server(tmp_path) as server, server.connect() as client:
        assert server.ask(adding(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            client.send(adding(1))
            assert_prompt(server)
            server.interrupt()
            assert server.wait(5) == 0
        assert 'ERROR' not in server.log


def test_database_that_hangs(tmp_path, server, url, asked):
    """While the database hangs, everything else is served; then nobody has to wait."""
    with (
        ExitStack() as opened,
        Proxy(server.port) as way,
        Server(
            tmp_path,
            hurried(tmp_path, ANSWER_WITHIN=1),
            PLANTS_STORE=url.replace(str(server.port), str(way.port)),
        ) as service,
    ):
        assert service.ask(adding(-1)).status == 200
        way.stop()
        clients = asked(service, opened)
        assert_prompt(service)
        statuses = {client.receive().status for client in clients}
        assert statuses == {503}
        assert threads(service) <= 30
        way.go_on()
        wait_until(lambda: service.ask(probing()).status == 200, 'it is ready again')
        assert service.ask(adding(1)).status == 200


def test_reader_that_is_slow(tmp_path):
    """A client that does not take its answer keeps nobody else waiting, and gets it."""
    target = '/docs/swagger-ui-bundle.js'
    with Server(tmp_path) as server, ExitStack() as opened:
        whole = server.ask(request('GET', target)).body
        clients = [opened.enter_context(server.connect()) for _ in range(20)]
        for client in clients:
            client.send(request('GET', target) * 3)
        assert_prompt(server)
        for client in clients:
            assert [client.receive().body for _ in range(3)] == [whole] * 3


def test_reader_that_leaves(tmp_path):
    """A client that goes away in the middle of its answer leaves nothing behind."""
    with Server(tmp_path) as server:
        for _ in range(20):
            with server.connect() as client:
                client.send(request('GET', '/docs/swagger-ui-bundle.js') * 3)
                assert client.is_readable(PROMPT)
        assert_prompt(server)
        (pid,) = server.worker_pids()
        files = Path(f'/proc/{pid}/fd')

        def sockets():
            names = []
            for entry in files.iterdir():
                with suppress(FileNotFoundError):  # it was closed in between
                    names.append(os.readlink(entry))
            return sum(name.startswith('socket:') for name in names)

        wait_until(lambda: sockets() < 10, 'their sockets are closed')
        assert 'ERROR' not in server.log


def test_adds_that_come_together(tmp_path):
    """Plants of many connections are stored once each, and each client is answered."""
    with Server(tmp_path) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(CROWD)]
        failed = []

        def add(place, client):
            for number in range(20):
                answer = client.ask(adding(place + CROWD * number))
                if answer.status != 200:
                    failed.append(answer)

        crowd = [threading.Thread(target=add, args=pair) for pair in enumerate(clients)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert not failed
        ids = [plant['id'] for plant in server.plants()]
        assert sorted(ids) == list(range(20 * CROWD))


@pytest.mark.parametrize(('clients', 'requests'), [(1, 150), (60, 3)])
def test_answers_that_nobody_takes(tmp_path, clients, requests):
    """Large answers to clients that do not read do not fill the memory."""
    target = '/docs/swagger-ui-bundle.js'  # 1.6 MiB
    with Server(tmp_path) as server, ExitStack() as opened:
        server.ask(request('GET', target))
        before = server.memory()
        for _ in range(clients):
            client = opened.enter_context(server.connect())
            client.send(request('GET', target) * requests)
            assert client.is_readable(PROMPT)
        assert_prompt(server)
        assert server.memory() < before + 20


def test_short_keepalive(tmp_path):
    """A new connection has its time for a first request, also if none is kept."""
    with Server(tmp_path, '--keep-alive=0') as server, server.connect() as client:
        time.sleep(1.5)  # the worker looks every second
        assert client.ask(probing()).status == 200


OTHER_APP = """
from pathlib import Path

def app(environ, start_response):
    size = Path(__file__).stat().st_size
    start_response('200 OK', [('Content-Length', str(size))])
    if environ['PATH_INFO'] == '/broken':
        return broken()
    return environ['wsgi.file_wrapper'](open(__file__, 'rb'))

def broken():
    yield b'begun'
    raise ValueError('broken')
"""


def test_another_application(tmp_path):
    """Whatever an application does with its answer, its worker goes on."""
    path = tmp_path / 'other.py'
    path.write_text(OTHER_APP)
    with Server(tmp_path, 'other:app', workers=None) as server:
        with server.connect() as kept:
            assert kept.ask(request('GET')).body == path.read_bytes()
            with pytest.raises(ConnectionError, match='after 5 of'):
                server.ask(request('GET', '/broken'))
            assert kept.ask(request('GET')).body == path.read_bytes()
        assert server.log.count('ValueError: broken') == 1
        assert server.log.count('Traceback') == 1
