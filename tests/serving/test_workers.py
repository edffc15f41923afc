"""Workers: sockets of each kind, failures, replacements, and every way to stop."""

import json
import os
import re
import signal
from collections import Counter
from contextlib import ExitStack, suppress

import exchange
import pytest
from exchange import Load, ask_in_step, assert_error, assert_quick, fern
from machine import client_at, locked, only_worker, open_files, paused
from rawclient import RawClient, request
from server import Server, is_alive, time_limits
from waiting import PATIENCE, in_threads, wait_until

PROBE = request('GET', '/livez')
LARGE = request('GET', exchange.LARGE_FILE)
OWN = ['--logger-class gunicorn.glogging.Logger', '-kgthread --threads=4 --workers=2']


def test_tls_is_served(secure):
    """Requests, pipelines, errors and large bodies work as they do without TLS."""
    with secure.connect() as client:
        for _ in range(3):
            assert ask_in_step(client, request(body=fern())).status == 200
        assert client.ask(request(body=fern(tag='x' * 60_000))).status == 200
        client.send(request(body=fern()) * 20)
        assert {client.receive().status for _ in range(20)} == {200}
        assert len(client.ask(LARGE).body) > 2**20
        assert_error(ask_in_step(client, request(body=b' ' * 5 * 2**20)), 40003)
    assert_error(secure.ask(b'GET / HTTP/9.9\r\n\r\n'), 40000)


def test_connection_without_a_handshake_is_closed(secure):
    """A client without TLS is disconnected; neither it nor a reset delays anybody."""
    for _ in range(100):
        RawClient(secure.port).reset()
    with ExitStack() as opened:
        clients = [opened.enter_context(RawClient(secure.port)) for _ in range(3)]
        for client, data in zip(clients, (b'', b'\x16\x03\x01', PROBE), strict=True):
            client.send(data)
        assert secure.ask(request(body=fern())).status == 200
        assert all(client.is_readable(PATIENCE) for client in clients)


@pytest.mark.parametrize('own', OWN)
def test_several_sockets_are_served(tmp_path, own):
    """Two ports and a Unix socket; also with the log or the workers of gunicorn."""
    bound = '--bind', '127.0.0.1:0', '--bind', '127.0.0.1:0', '--bind', 'unix:s'
    with Server(tmp_path, *bound, *own.split()) as server, ExitStack() as opened:
        ports = map(int, re.findall(r'http://127.0.0.1:(\d+)', server.log)[:2])
        clients = [*map(RawClient, ports), client_at(tmp_path / 's')]
        for client in map(opened.enter_context, clients):
            assert ask_in_step(client, request(body=fern())).status == 200
        seen = []
        in_threads(*40 * [lambda: seen.append(server.ask(request(body=fern())).status)])
        assert (seen, len(server.plants())) == (40 * [200], 43)


def test_application_that_fails_ends_only_its_connection(tmp_path):
    """The answer is 500, and the connection ends; others go on."""
    # With a header that has lines in it.
    fail = 'lambda environ, start: start("200 OK", [("a", "\\r\\nb: c")]) and []'
    conf = ['def post_worker_init(worker):', f'    worker.wsgi = {fail}']
    with Server(tmp_path, conf=conf, PLANTS_LOG='json\r') as server:
        for _ in range(2):
            with server.connect() as client:
                client.send(2 * PROBE)
                answer = exchange.receive_last(client)
            assert_error(answer, 50000)
            id = answer.headers['x-request-id']
            assert re.search(f'{id}.*Traceback', server.log)


def test_few_connections_belong_to_one_worker(service):
    """Idle ones do not count; many are spread, and a stopped worker delays nobody."""
    with ExitStack() as opened:
        for _ in range(8):
            opened.enter_context(service.connect())
        # Several times: once it may be luck.
        wait_until(lambda: all(most_held(service, 4) == 4 for _ in range(9)), 'one')
        wait_until(lambda: all(most_held(service, 40) < 31 for _ in range(3)), 'both')
        for pid in service.worker_pids():
            with paused(pid):
                for _ in range(20):
                    assert_quick(opened.enter_context(service.connect()))


def most_held(server, number):
    """Connect clients; return how many of them the busier worker serves."""
    with ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(number)]
        logged = request('GET', authorization=None)
        ids = [client.ask(logged).headers['x-request-id'] for client in clients]
        wait_until(lambda: all(f'{id} ' in server.log for id in ids), 'it is logged')
    lines = re.findall(r'\[(\d+)\] \[INFO\] (\S+) ', server.log)
    return max(Counter(pid for pid, id in lines if id in ids).values())


# ---- stops


@pytest.mark.parametrize('number', ['SIGTERM', 'SIGQUIT', 'SIGINT', 'SIGKILL'])
def test_server_that_stops_answers_or_closes(tmp_path, number):
    """Each client has its answer or a closed connection, never 503; 200 is stored."""
    others = [b'', PROBE, PROBE[:20], request(body=b'{"id"', content_length='100')]
    with (
        Server(tmp_path, '-p', 'pid', workers=2) as server,
        ExitStack() as opened,
        Load(server) as load,  # it asserts that each status is 200
    ):
        load.wait_for_all()
        if number in ('SIGQUIT', 'SIGINT'):  # they end at once
            for data in 2 * others:
                opened.enter_context(server.connect()).send(data)
        pids = server.worker_pids()
        if number == 'SIGINT':  # as of a terminal, and often
            with suppress(ProcessLookupError):
                for _ in range(2_000):
                    os.killpg(server.pid, signal.SIGINT)
        else:
            server.signal(signal.Signals[number])
        wait_until(lambda: not any(map(is_alive, pids)), 'the workers end', 20)
        if number != 'SIGKILL':
            assert server.wait() == 0
            assert not (tmp_path / 'pid').exists()
    stored = [plant['id'] for plant in server.plants()]
    assert len(stored) == len(set(stored))
    assert {plant['id'] for plant in load.added} <= set(stored)
    assert 'Traceback' not in server.log


def stop(server, number=signal.SIGTERM):
    """Stop a server, and return when its worker accepts no more connections."""
    server.signal(number)

    def refuses():
        try:
            server.connect().close()
        except ConnectionError:
            return True

    wait_until(refuses, 'it accepts no more connections')


def test_quick_stop_closes_connections_before_the_store(tmp_path):
    """While an add still keeps the store open, no client hears that it is closed."""
    conf = ['from store import committer', 'from store.jsonl import disk']
    conf += ['committer.CLOSE_WITHIN = disk.LOCK_WITHIN = 3600']
    with Server(tmp_path, conf=conf) as server, server.connect() as idle:
        assert idle.ask(PROBE).status == 200
        with locked(tmp_path / 'plants.jsonl'), server.connect() as waiting:
            waiting.send(request(body=fern()))
            worker, file = only_worker(server), f'{tmp_path}/plants.jsonl'
            wait_until(lambda: file in open_files(worker).values())
            stop(server, signal.SIGQUIT)
            assert idle.ask(request(body=fern())) is None
        assert server.wait(20) == 0
        assert len(server.plants()) == 1  # it has waited for the store


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_each_client_has_one_more_answer_as_the_server_stops(tmp_path, number):
    """Idle, before an answer is read, in a pipeline, and while a body is read."""
    plants = [fern() for _ in range(4)]
    body = json.dumps(plants[1]).encode()
    how = {'expect': '100-continue', 'content_type': 'application/json'}
    with Server(tmp_path, conf=time_limits(LINGER=60)) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in plants]
        pipelining, waiting, idle, busy = clients
        assert idle.ask(PROBE).status == 200
        busy.send(LARGE)
        assert busy.is_readable(PATIENCE)
        waiting.send(exchange.chunked(**how, end=b''))
        assert waiting.receive().status == 100
        with locked(tmp_path / 'plants.jsonl'):
            pipelining.send(request(body=plants[0]) + request(body=fern()) * 2)
            stop(server, number)
        assert not busy.receive().announces_close
        assert not idle.is_readable(0.5)
        waiting.send(b'%x\r\n%b\r\n0\r\n\r\n' % (len(body), body))
        idle.send(request(body=plants[2]))
        busy.send(request(body=plants[3]))
        for client in clients:
            assert exchange.receive_last(client).status == 200
        assert sorted(map(str, server.plants())) == sorted(map(str, plants))
