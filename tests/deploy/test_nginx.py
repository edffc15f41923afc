"""The service behind nginx, with ``deploy/nginx.conf``."""

import json
import re
import shutil
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer

import pytest
from exchange import assert_error, chunked, fern, table
from machine import edit
from server import (
    REPOSITORY,
    TOKEN,
    RawClient,
    Server,
    finished,
    free_port,
    installed,
    make_certificate,
    request,
    wait_until,
)

TEMPORARY = ('client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi')
MAIN = 'pid nginx.pid; error_log error.log warn; events {} http { include plants.conf; '
MAIN += ' '.join(f'{name}_temp_path {name};' for name in TEMPORARY) + ' }\n'


class Nginx:
    """nginx in a directory with the recipe, with other paths, port and host name."""

    def __init__(self, directory):
        self.directory = directory
        self.upstream = directory / 'plants.sock'
        self.port = free_port()
        self._trust = make_certificate(directory)
        shutil.copy(REPOSITORY / 'deploy/nginx.conf', directory / 'plants.conf')
        for theirs, ours in {
            'listen 443': f'listen 127.0.0.1:{self.port}',
            'plants.example.org': 'localhost',
            '/etc/ssl/private/': '',
            '/etc/ssl/': '',
            '/run/plants.sock': f'{self.upstream}',
            '/var/log/nginx/plants.log': 'access.log',
            # So that a flood is one on a busy machine, too: only the burst passes.
            'rate=500r/s': 'rate=1r/s',
        }.items():
            edit(directory / 'plants.conf', theirs, ours)
        # NOTE: the default user of nginx's workers may not enter a directory of root.
        user = 'user root;' if directory.stat().st_uid == 0 else ''
        (directory / 'nginx.conf').write_text(user + MAIN)

    def _run(self, *arguments):
        """Run nginx, which returns when its daemon listens or has the signal."""
        command = installed('nginx', 'nginx-light'), '-p', self.directory
        finished([*command, '-c', 'nginx.conf', *arguments], check=True)

    def __enter__(self):
        self._run()
        return self

    def __exit__(self, *exc_info):
        self._run('-s', 'stop')
        pid = self.directory / 'nginx.pid'
        wait_until(lambda: not pid.exists(), 'nginx ends')

    def connect(self, *, tls=True, source=None):
        return RawClient(self.port, source=source, trust=tls and self._trust)

    def ask(self, data, **how):
        with self.connect(**how) as client:
            return client.ask(data)

    @property
    def log(self):
        return (self.directory / 'access.log').read_text()


@pytest.fixture(scope='module')
def nginx(tmp_path_factory):
    """nginx, in front of any upstream that listens."""
    with Nginx(tmp_path_factory.mktemp('nginx')) as nginx:
        yield nginx
    errors = (nginx.directory / 'error.log').read_text()
    assert '[alert]' not in errors
    assert 'buffered to a temporary file' not in errors
    assert TOKEN not in errors + nginx.log


@pytest.fixture(scope='module')
def service(nginx, tmp_path_factory):
    """The service, on the socket to which nginx connects and on a port."""
    addresses = f'--bind 127.0.0.1:0 --bind unix:{nginx.upstream}'
    directory = tmp_path_factory.mktemp('behind')
    with Server(directory, workers=2, GUNICORN_CMD_ARGS=addresses) as service:
        yield service


def test_answers_of_the_service_pass_unchanged(service, nginx):
    """A plant that is sent three times is stored once; an Error has its message."""
    plant = fern()
    with nginx.connect() as client:
        for _ in range(3):
            answer = client.ask(request(body=plant))
            assert (answer.status, answer.json) == (200, {'name': 'Fern'})
        message = assert_error(client.ask(request(body=plant | {'id': 1.5})), 40005)
        assert '1.5' in message
        assert_error(client.ask(request(body=plant, authorization=None)), 40100)
    assert_error(nginx.ask(request(body=fern()), tls=False), 40000)  # plain HTTP
    assert_error(nginx.ask(request(body=b' ' * 65_536)), 40004)
    assert service.plants().count(plant) == 1


FAULTS = {
    'too large': (40003, request(body=b' ' * 65_537)),
    'not HTTP': (40000, b'{}\r\n\r\n'),
    'target too long': (41400, request(target='/' + 'x' * 9_000)),
    'header too long': (43100, request(x_long='x' * 9_000)),
    'TRACE': (40500, request('TRACE')),
    'unknown coding': (50100, request(body=fern(), transfer_encoding='gzip')),
}


@table(('value', 'data'), FAULTS)
def test_error_of_nginx_has_the_same_value(service, nginx, value, data):
    """A request that nginx refuses gets the error value of the service."""
    answer = nginx.ask(data)
    assert_error(answer, value)
    assert re.fullmatch('[0-9a-f]{32}', answer.headers['x-request-id'])


def test_flood_of_one_address_is_limited(service, nginx):
    """Of many requests at once from an address some are refused; others are served."""
    data = request('GET', '/livez')
    answers = []
    while not any(answer.status == 503 for answer in answers):
        with ExitStack() as opened:  # nginx closes a connection after 1,000 requests
            connections = [nginx.connect(source='127.0.0.9') for _ in range(20)]
            for client in map(opened.enter_context, connections):
                client.send(data * 100)
            for client in connections:
                answers += [client.receive() for _ in range(100)]
            assert nginx.ask(request(body=fern())).status == 200
    refused = [answer for answer in answers if answer.status == 503]
    assert_error(refused[0], 50300)
    assert {answer.status for answer in answers} == {200, 503}


def test_request_id_is_the_same_everywhere(service, nginx):
    """The client, the log of nginx and the log of the service have the same id."""
    answer = nginx.ask(request(body=fern(), x_request_id='from-the-client'))
    assert answer.headers['x-request-id'] == 'from-the-client'
    id = nginx.ask(request(body=fern(), x_request_id='not sane')).headers[
        'x-request-id'
    ]
    assert re.fullmatch('[0-9a-f]{32}', id)
    wait_until(lambda: id in service.log, 'the service logs it')
    wait_until(lambda: f' {id} POST /plants 200 ' in nginx.log, 'nginx logs it')


ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}'


class Handler(BaseHTTPRequestHandler):
    """Send the reply that the test names; close after one that is not ``ANSWER``."""

    protocol_version = 'HTTP/1.1'

    def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        self.server.received.append((self.headers, json.loads(body)))
        reply = self.server.replies.pop(0)
        self.wfile.write(reply)
        self.close_connection = reply != ANSWER


class Upstream(ThreadingMixIn, UnixStreamServer):
    """A server in place of the service, with a reply for each request."""

    daemon_threads = True

    def __init__(self, path, *replies):
        super().__init__(str(path), Handler)
        self.received, self.replies = [], list(replies)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.01]).start()
        return self

    def __exit__(self, *exc_info):
        self.shutdown()  # returns when the thread is about to end
        self.server_close()


def test_service_that_is_away_or_slow_or_closes(tmp_path):
    """Missing: 503; a closed kept connection: once more; a slow request: when whole."""
    one, two, slow, fast = fern(), fern(), fern(), fern()
    forged = {'x_forwarded_proto': 'http', 'x_forwarded_for': '127.0.0.2'}
    with Nginx(tmp_path) as nginx:
        answer = nginx.ask(request('POST', '/plants?access_token=secret', fern()))
        assert_error(answer, 50300)
        logged = f' {answer.headers["x-request-id"]} POST /plants 503 '
        wait_until(lambda: logged in nginx.log, 'it is logged, without the query')
        assert 'secret' not in nginx.log
        replies = ANSWER, b'', ANSWER, ANSWER, ANSWER, b'HTTP/1.1 200 O'
        with Upstream(nginx.upstream, *replies) as upstream, nginx.connect() as client:
            assert nginx.ask(request(body=one, **forged)).status == 200
            assert nginx.ask(request(body=two)).status == 200
            data = chunked(json.dumps(slow).encode())
            client.send(data[:-1])
            assert nginx.ask(request(body=fast)).status == 200
            client.send(data[-1:])
            assert client.receive().status == 200
            assert_error(nginx.ask(request(body=fern())), 50300)
        assert [plant for _, plant in upstream.received[:5]] == [
            one,
            two,
            two,
            fast,
            slow,
        ]
        headers, _ = upstream.received[0]
        assert headers['X-Forwarded-Proto'] == 'https'
        assert headers['X-Forwarded-For'] == '127.0.0.1'
