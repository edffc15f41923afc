"""Requests that wait for the store: they do not block the worker's event loop."""

import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from exchange import MAX_ANSWER_SECONDS, SHORT_DATABASE_LIMITS
from machine import locked
from proxy import Proxy
from server import Server, request, wait_until

CROWD = 40  # requests; more than the worker's pool has threads
READY = request('GET', '/readyz')


def send_crowd(server, opened):
    """Send 40 adds and 40 probes; return the clients."""
    clients = [opened.enter_context(server.connect()) for _ in range(2 * CROWD)]
    for id, client in enumerate(clients):
        client.send(add_request(id) if id % 2 else READY)
    return clients


def add_request(id):
    """Return a request that adds a plant."""
    return request(body={'id': id, 'name': 'Fern'})


def assert_prompt(server):
    """Check that requests which need no store are answered quickly."""
    for _ in range(5):
        began = time.monotonic()
        assert server.ask(request('GET', '/livez')).status == 200
        assert server.ask(request(authorization=None)).status == 401
        assert time.monotonic() - began < MAX_ANSWER_SECONDS


def test_locked_file_delays_only_requests_to_the_store(tmp_path):
    """While another process has the lock, requests without the store are answered."""
    with ExitStack() as opened, Server(tmp_path) as server:
        assert server.ask(add_request(-1)).status == 200
        with locked(tmp_path / 'plants.jsonl'):
            clients = send_crowd(server, opened)
            assert_prompt(server)
            assert not any(client.is_readable() for client in clients)
        assert [client.receive().status for client in clients] == [200] * len(clients)
        assert len(server.lines()) == CROWD + 1


def test_hanging_database_delays_only_requests_to_the_store(tmp_path, url):
    """While the database hangs, other requests are answered, and adds end with 503."""
    with (
        ExitStack() as opened,
        Proxy(urlsplit(url).port) as proxy,
        Server(
            tmp_path, conf=SHORT_DATABASE_LIMITS, PLANTS_STORE=proxy.url(url)
        ) as server,
    ):
        # A database that takes longer than a second is away, also on a busy machine.
        wait_until(lambda: server.ask(add_request(-1)).status == 200, 'it adds')
        proxy.stop()
        clients = send_crowd(server, opened)
        assert_prompt(server)
        assert {client.receive().status for client in clients} == {503}
        proxy.go_on()
        wait_until(lambda: server.ask(READY).status == 200, 'it is ready')
        wait_until(lambda: server.ask(add_request(1)).status == 200, 'it adds again')
