"""Worker classes: gunicorn's own, and ours with TLS and with other applications."""

import os
import random
import re
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from statistics import median

import pytest
from exchange import (
    LARGE_FILE,
    SHORT_LIMITS,
    ask_in_step,
    assert_error,
    fern,
    parse_json_log,
    receive_last,
)
from machine import client_at, stop
from server import RawClient, Server, TLSServer, request
from waiting import PATIENCE, wait_until


@pytest.mark.parametrize('kind', ['gthread', 'sync', 'gevent'])
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
            client.send(request(body=fern()) * 20)
            assert {client.receive().status for _ in range(20)} == {200}
            assert len(client.ask(request('GET', LARGE_FILE)).body) > 2**20
            assert_error(ask_in_step(client, request(body=b' ' * 5 * 2**20)), 40003)
        assert_error(server.ask(b'GET / HTTP/9.9\r\n\r\n'), 40000)
        assert 'Traceback' not in server.log


def test_connection_without_a_handshake_is_closed(tmp_path):
    """A client without TLS is disconnected, delays nobody, and is named in the log."""
    lines = [*SHORT_LIMITS, 'client.FIRST_REQUEST = 1']
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
        sentence = 'a connection was refused (HTTP to a port for HTTPS?)'
        wait_until(lambda: server.log.count(sentence) == 3, 'it is logged')
        assert 'Traceback' not in server.log


def test_handshake_that_is_made_as_the_server_stops_is_answered(tmp_path):
    """A stop before a handshake: one request is answered, silent clients are closed."""
    with TLSServer(tmp_path) as server, ExitStack() as opened:
        silent = opened.enter_context(RawClient(server.port))
        over = opened.enter_context(
            socket.create_connection(('127.0.0.1', server.port))
        )
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


def test_open_connection_has_one_more_answer_as_the_server_stops(tmp_path):
    """An idle client, and one whose answer has begun, may send one more request."""
    lines = ['from serving import worker', 'worker.LINGER = 60']
    with Server(tmp_path, conf=lines) as server, ExitStack() as opened:
        idle, busy = (opened.enter_context(server.connect()) for _ in range(2))
        assert idle.ask(request('GET', '/livez')).status == 200
        busy.send(request('GET', LARGE_FILE))
        assert busy.is_readable(PATIENCE)
        stop(server)
        assert not busy.receive().announces_close
        assert not idle.is_readable(0.5)
        for client in (idle, busy):
            client.send(request(body=fern()))
            assert receive_last(client).status == 200


OTHER_APP = """
from pathlib import Path

def app(environ, start_response):
    size = Path(__file__).stat().st_size
    if environ['PATH_INFO'] == '/header':
        start_response('200 OK', [('a b', 'c')])
    if environ['PATH_INFO'] == '/value':
        start_response('200 OK', [('a', 'b\\nc')])
    if environ['PATH_INFO'] == '/raised':
        raise ValueError('raised')
    if environ['PATH_INFO'] == '/missing':
        open('/nowhere/missing')
    start_response('200 OK', [('Content-Length', str(size))])
    if environ['PATH_INFO'] == '/broken':
        return broken()
    return environ['wsgi.file_wrapper'](open(__file__, 'rb'))

def broken():
    yield b'begun'
    raise ValueError('broken')
"""


def test_application_that_fails_ends_only_its_connection(tmp_path):
    """After an exception, also in mid-answer, a worker goes on and calls its hooks."""
    path = tmp_path / 'other.py'
    path.write_text(OTHER_APP)
    hook = 'post_request = lambda worker, a, b, c: worker.log.info("hook called")'
    how = {'conf': [hook], 'workers': None, 'PLANTS_LOG': 'json'}
    with Server(tmp_path, 'other:app', **how) as server:
        hooks = server.log.count('hook called')
        with server.connect() as kept:
            assert kept.ask(request('GET')).body == path.read_bytes()
            with pytest.raises(ConnectionError, match='after 5 of'):
                server.ask(request('GET', '/broken'))
            assert kept.ask(request('GET')).body == path.read_bytes()
        for target in ('/header', '/value', '/raised', '/missing'):
            with server.connect() as client:
                client.send(request('GET') + request('GET', target))
                assert client.receive().body == path.read_bytes()
                answer = client.receive()
            assert_error(answer, 50000)
            assert f'{answer.headers["x-request-id"]}: request failed' in server.log
        logged = [line.get('exception', '') for line in parse_json_log(server.log)]
        assert sum(text.startswith('Traceback') for text in logged) == 5
        assert sum(text.endswith('\nValueError: broken') for text in logged) == 1
        assert server.log.count('hook called') >= hooks + 11


ENVIRON_APP = """
import json

class Body(list):
    def close(self):
        print('the body is closed', flush=True)

def app(environ, start_response):
    environ['wsgi.errors'].write('seen\\n')
    body = environ['wsgi.input'].read()
    names = [name for name in environ if name.startswith(('HTTP_', 'REMOTE_'))]
    names += ['wsgi.url_scheme', 'wsgi.multithread', 'SERVER_PORT']
    seen = {name: environ.pop(name) for name in names} | {'body': body.decode()}
    environ.clear()
    text = json.dumps(seen).encode()
    headers = [('Content-Type', 'application/json'), ('Content-Length', str(len(text)))]
    start_response('200 OK', headers)
    return Body([text])
"""


@pytest.fixture
def serve_environ(tmp_path):
    """A function that serves an application which answers with its environ."""
    (tmp_path / 'environ.py').write_text(ENVIRON_APP)
    return partial(Server, tmp_path, 'environ:app', '-w1', workers=None)


def test_requests_with_the_same_head_keep_their_environ(serve_environ):
    """What is cached of a head does not include the body and the client."""
    bound = 2 * ('--bind', '127.0.0.1:0')
    with serve_environ('--forwarded-allow-ips', '127.0.0.2', *bound) as server:
        ports = re.findall(r'http://127.0.0.1:(\d+)', server.log)[:2]
        for source, port in product(('127.0.0.1', '127.0.0.2'), ports):
            with RawClient(int(port), source=source) as client:
                for body in (b'{"id": 1}', b'{"id": 2}'):
                    data = request(body=body, x_forwarded_proto='https')
                    seen = client.ask(data).json
                    assert seen['body'] == body.decode()
                    assert seen['REMOTE_ADDR'] == source
                    assert seen['SERVER_PORT'] == str(port)
                    assert seen['wsgi.multithread'] is True
                    assert seen['REMOTE_PORT'] == str(client._socket.getsockname()[1])
                    scheme = 'https' if source == '127.0.0.2' else 'http'
                    assert seen['wsgi.url_scheme'] == scheme
        assert server.log.count('seen') == server.log.count('the body is closed') >= 6


def test_clients_of_a_unix_socket_keep_their_addresses(serve_environ, tmp_path):
    """Clients that are bound to paths have these as addresses, whatever they send."""
    with serve_environ('--bind', '127.0.0.1:0', '--bind', f'unix:{tmp_path}/s'):
        for path in (f'{tmp_path}/1', f'{tmp_path}/2', ''):
            with client_at(tmp_path / 's', path) as client:
                for _ in range(2):
                    assert client.ask(request('GET')).json['REMOTE_ADDR'] == path


V1 = b'PROXY TCP4 192.0.2.1 192.0.2.2 1234 80\r\n'
V2 = b'\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\2\1\xc0\0\2\2\4\xd2\0\x50'
V2_LOCAL = V2[:12] + b'\x20\0\0\0'
V1_FORM = re.compile(rb'PROXY TCP4 ([0-9.]+) [0-9.]+ ([1-9][0-9]*) [1-9][0-9]*\r\n')


def client_of(answer):
    """Return the address and the port that the application was told."""
    return answer.json['REMOTE_ADDR'].encode(), answer.json['REMOTE_PORT'].encode()


def test_proxy_header_is_believed_or_refused(serve_environ):
    """It is about its whole connection; with a byte changed, it is so, or refused."""
    choose = random.Random(0)
    accepted, data = 0, request('GET')
    with serve_environ('--proxy-protocol') as server:
        for announced, address in ((b'', '127.0.0.1'), (V1, '192.0.2.1')) * 2:
            with server.connect() as client:
                for sent in (announced + data, data, data):
                    assert client.ask(sent).json['REMOTE_ADDR'] == address
        address, port = client_of(server.ask(V2_LOCAL + data))
        assert (address, port != b'None') == (b'127.0.0.1', True)
        for header, place in [(each, n) for each in (V1, V2) for n in range(len(each))]:
            for byte in {0, 9, 43, 48, 57, 95, 128, 255, choose.randrange(256)}:
                sent = header[:place] + bytes([byte]) + header[place + 1 :]
                with server.connect() as client:
                    client.send(sent + data)
                    client.finish_sending()
                    answer = client.receive()
                if answer is None:  # it announced more bytes than came
                    assert (header, place) in [(V2, 14), (V2, 15)]
                elif answer.status != 200:
                    assert_error(answer, 40000)
                elif header is V1:
                    accepted += 1
                    assert client_of(answer) == V1_FORM.fullmatch(sent).groups()
                else:
                    accepted += 1
                    address = socket.inet_ntop(socket.AF_INET, sent[16:20])
                    announced = address, str(int.from_bytes(sent[24:26]))
                    assert client_of(answer) == tuple(map(str.encode, announced))
    assert accepted > 20
    assert 'Traceback' not in server.log


CHANGE_REQUEST = """
numbers = iter(range(9))

def pre_request(worker, request):
    request.headers.append(('X-NUMBER', str(next(numbers))))
"""


def test_pre_request_may_change_each_request(serve_environ):
    """What the operator's hook does with a request is not in the next one."""
    with serve_environ(conf=[CHANGE_REQUEST]) as server:
        seen = [server.ask(request('GET')).json for _ in range(3)]
    numbers = [int(one['HTTP_X_NUMBER']) for one in seen]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


COUNTING = """
from serving.master import connection_counts

def post_request(worker, request, environ, response):
    worker.log.info('open: %d %d', sum(connection_counts), len(worker._clients))
"""


def test_connections_that_ended_are_not_counted(tmp_path):
    """Neither a closed connection nor a dead worker is counted, or kept."""
    with Server(tmp_path, conf=[COUNTING]) as server:

        def all_have_ended(since=0):  # one worker counts as one, and this connection
            server.ask(request('GET', '/livez'))
            found = re.findall('open: (.*)', server.log[since:])
            return len(found) > 5 and found[-1] == '2 1'

        wait_until(all_have_ended, 'they are not counted')
        (victim,), since = server.worker_pids(), len(server.log)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: server.worker_pids() - {victim}, 'another one starts')
        wait_until(lambda: all_have_ended(since), 'it is not counted')


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
