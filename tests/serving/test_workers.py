"""Workers: sockets of each kind, failures, and every way to stop."""

import json
import os
import re
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median

import pytest
from exchange import (
    LARGE_FILE,
    SHORT_LIMITS,
    Load,
    ask_in_step,
    assert_error,
    chunked,
    fern,
    receive_last,
    table,
)
from machine import client_at, locked, only_worker, stop
from server import PATIENCE, RawClient, Server, TLSServer, is_alive, request, wait_until


@pytest.mark.parametrize('kind', ['gthread', 'sync'])
def test_worker_class_of_gunicorn_serves_plants(tmp_path, kind):
    """Gunicorn's own workers serve the same application, also many adds at once."""
    with Server(tmp_path, '-k', kind, workers=2) as server:
        with ThreadPoolExecutor(8) as pool:
            plants = [fern() for _ in range(40)]
            answers = pool.map(lambda plant: server.ask(request(body=plant)), plants)
            assert {answer.status for answer in answers} == {200}
        assert_error(server.ask(request(body=plants[0] | {'name': 'Moss'})), 40006)
        assert_error(server.ask(request(body=b'{')), 40004)
        assert len(server.plants()) == len(plants)


def test_tls_is_served(tmp_path):
    """Requests, pipelines, errors and large bodies work as they do without TLS."""
    with TLSServer(tmp_path, conf=SHORT_LIMITS, workers=2) as server:
        with server.connect() as client:
            for _ in range(3):
                assert ask_in_step(client, request(body=fern())).status == 200
            body = json.dumps(fern()).encode().ljust(60_000)  # four records
            assert ask_in_step(client, request(body=body)).status == 200
            client.send(request(body=fern()) * 20)
            assert {client.receive().status for _ in range(20)} == {200}
            assert len(client.ask(request('GET', LARGE_FILE)).body) > 2**20
            assert_error(ask_in_step(client, request(body=b' ' * 5 * 2**20)), 40003)
        assert_error(server.ask(b'GET / HTTP/9.9\r\n\r\n'), 40000)
        assert 'Traceback' not in server.log


def test_connection_without_a_handshake_is_closed(tmp_path):
    """A client without TLS is disconnected, and delays nobody."""
    lines = [*SHORT_LIMITS, 'connection.FIRST_REQUEST = 1']
    with TLSServer(tmp_path, conf=lines) as server:
        with ExitStack() as opened:
            silent = [opened.enter_context(RawClient(server.port)) for _ in range(9)]
            for client in silent[:3]:
                client.send(b'\x16\x03\x01')
            for client in silent[3:6]:
                client.send(request(body=fern()))
            assert server.ask(request(body=fern())).status == 200
            for client in silent:
                assert client.is_readable(PATIENCE)
            with server.connect() as client:
                client.send(request()[:30])
                assert client.is_readable(PATIENCE)
        assert server.ask(request(body=fern())).status == 200
        assert 'Traceback' not in server.log


def test_several_sockets_are_served(tmp_path):
    """Two ports and a Unix socket are served, whatever address a client has."""
    path = tmp_path / 's'
    bound = '--bind', '127.0.0.1:0', '--bind', '127.0.0.1:0', '--bind', f'unix:{path}'
    with Server(tmp_path, *bound) as server, ExitStack() as opened:
        ports = re.findall(r'http://127.0.0.1:(\d+)', server.log)[:2]
        clients = [opened.enter_context(RawClient(int(port))) for port in ports]
        clients += [opened.enter_context(client_at(path, source=f'{path}-client'))]
        clients += [opened.enter_context(client_at(path))]
        for client in clients:
            for data in (request(body=fern()), chunked(json.dumps(fern()).encode())):
                assert ask_in_step(client, data).status == 200
        assert len(server.plants()) == 2 * len(clients)


FAILING = """
def post_worker_init(worker):
    def fail(environ, start_response, served=worker.wsgi):
        if environ['PATH_INFO'] == '/raised':
            raise ValueError('raised')
        if environ['PATH_INFO'] == '/value':
            start_response('200 OK', [('a', 'b\\r\\nc: d')])
            return [b'']
        if environ['PATH_INFO'] == '/broken':
            start_response('200 OK', [])
            return (0 / 0 for _ in 'x')
        return served(environ, start_response)
    worker.wsgi = fail
"""


def test_application_that_fails_ends_only_its_connection(tmp_path):
    """After an exception, also in the middle of a body, the answer is 500."""
    with Server(tmp_path, conf=[FAILING]) as server, server.connect() as kept:
        for target in ('/raised', '/value', '/broken'):
            assert kept.ask(request('GET', '/livez')).status == 200
            with server.connect() as client:
                client.send(request('GET', '/livez') + request('GET', target))
                assert client.receive().status == 200
                answer = receive_last(client)
            assert_error(answer, 50000)
            assert f'{answer.headers["x-request-id"]}: request failed' in server.log
        assert server.log.count('Traceback') == 3


def test_worker_ends_after_its_last_request(tmp_path):
    """With max_requests a worker announces the end, and another one takes over."""
    with Server(tmp_path, '--max-requests', '5') as server:
        pid = only_worker(server)
        with server.connect() as client:
            while not client.ask(request(body=fern())).announces_close:
                pass
            assert client.receive() is None
        wait_until(lambda: server.worker_pids() - {pid}, 'another one starts')
        assert server.ask(request(body=fern())).status == 200


STOPS = {
    'TERM': (signal.SIGTERM, False),
    'QUIT': (signal.SIGQUIT, False),
    'INT': (signal.SIGINT, False),
    'QUIT to the workers': (signal.SIGQUIT, True),
    'the master is killed': (signal.SIGKILL, False),
}


@table('number, of_workers', STOPS)
def test_no_stop_answers_that_the_store_is_closed(tmp_path, number, of_workers):
    """On every stop a client gets 200 or the end of its connection, and no 503."""
    with Server(tmp_path, workers=2) as server, Load(server) as load:
        load.wait_for_all()
        pids = server.worker_pids()
        for pid in pids if of_workers else [server.pid]:
            os.kill(pid, number)
        wait_until(lambda: not any(map(is_alive, pids)), 'the workers end')
        if of_workers:
            load.wait_for_all()
    added = [plant['id'] for plant in server.plants()]
    assert {plant['id'] for plant in load.added} <= set(added)
    assert len(added) == len(set(added))
    assert 'Traceback' not in server.log


def test_request_that_has_begun_as_the_server_stops_is_answered(tmp_path):
    """A stop in a pipeline, or while a body is read: one more answer, with the end."""
    plants = [fern(), fern(), fern()]
    bodies = [json.dumps(plant).encode() for plant in plants]
    how = {'expect': '100-continue', 'content_type': 'application/json'}
    sent = [b''.join(request(body=plant) for plant in (plants[0], fern(), fern()))]
    sent += [request(body=bodies[1], **how), chunked(bodies[2], **how)]
    with Server(tmp_path) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in sent]
        with locked(tmp_path / 'plants.jsonl'):
            for client, data in zip(clients, sent, strict=True):
                client.send(data[:-10])
            for client in clients[1:]:
                assert client.receive().status == 100
            stop(server)
        for client, data in zip(clients, sent, strict=True):
            client.send(data[-10:])
            assert receive_last(client).status == 200
        assert server.wait() == 0
        assert sorted(map(str, server.plants())) == sorted(map(str, plants))


@pytest.mark.parametrize('is_killed', [False, True])
def test_open_connection_has_one_more_answer_as_the_server_stops(tmp_path, is_killed):
    """An idle client, and one whose answer has begun, may send one more request."""
    lines = ['connection.LINGER = 60']
    with Server(tmp_path, conf=lines) as server, ExitStack() as opened:
        idle, busy = (opened.enter_context(server.connect()) for _ in range(2))
        assert idle.ask(request('GET', '/livez')).status == 200
        busy.send(request('GET', LARGE_FILE))
        assert busy.is_readable(PATIENCE)
        if is_killed:
            server.signal(signal.SIGKILL)
            wait_until(lambda: 'the master is gone' in server.log, 'it is noticed')
        else:
            stop(server)
        assert not busy.receive().announces_close
        assert not idle.is_readable(0.5)
        for client in (idle, busy):
            client.send(request(body=fern()))
            assert receive_last(client).status == 200


def test_silent_client_does_not_delay_a_stop(tmp_path):
    """Clients that idle before a handshake are closed soon, a late one is answered."""
    with TLSServer(tmp_path) as server, ExitStack() as opened:
        silent = opened.enter_context(RawClient(server.port))
        over = socket.create_connection(('127.0.0.1', server.port))
        # Connections are accepted in their order.
        assert server.ask(request(body=fern())).status == 200
        stop(server)
        over = server.context.wrap_socket(over, server_hostname='localhost')
        with RawClient(over=over) as client:
            client.send(request(body=fern()))
            assert receive_last(client).status == 200
        assert silent.is_readable(PATIENCE)
        assert server.wait() == 0
        assert 'Traceback' not in server.log


@pytest.mark.parametrize(('number', 'at_once'), [(4, False), (16, True)])
def test_connections_are_spread(service, number, at_once):
    """Kept connections are spread evenly over two workers."""
    # The median: a worker that the machine delays by some milliseconds gets fewer.
    most = median(most_held(service, number, at_once) for _ in range(11))
    assert most <= number // 2 + number // 8


def most_held(server, number, at_once):
    """Connect some clients; return how many of them the busier worker serves."""
    clients = []
    with ExitStack() as connections:
        for _ in range(number):
            clients.append(connections.enter_context(server.connect()))
            if not at_once:
                clients[-1].ask(request('GET', '/livez'))
        answers = [client.ask(request('GET', '/livez')) for client in clients]
    return max(Counter(map(server.worker_of, answers)).values())
