"""Requests that wait for the store: one thread serves all, and nothing holds it up."""

import fcntl
import threading
import time
from contextlib import ExitStack
from contextlib import contextmanager
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


def test_locked_file_hinders_only_adds(tmp_path, asked):
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


def test_interrupt_ends_a_server_that_waits_for_the_file(tmp_path):
    """Ctrl-C ends the server also while an add waits for the file."""
    with Server(tmp_path) as server, server.connect() as client:
        assert server.ask(adding(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            client.send(adding(1))
            assert_prompt(server)
            server.interrupt()
            assert server.wait(5) == 0
        assert 'ERROR' not in server.log


def test_hanging_database_hinders_only_adds(tmp_path, server, url, asked):
    """While the database hangs, everything else is served; then nobody has to wait."""
    with (
        ExitStack() as opened,
        Proxy(server.port) as way,
        Server(
            tmp_path,
            *hurried(tmp_path, ANSWER_WITHIN=1),
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


def test_adds_that_come_together_are_stored_once(tmp_path):
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
