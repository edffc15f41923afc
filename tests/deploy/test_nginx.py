"""The service behind nginx, with ``deploy/nginx.conf``."""

import json
import re
import shutil
import subprocess
import threading
from contextlib import ExitStack
from functools import partial
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
    free_port,
    installed,
    make_certificate,
    request,
    wait_until,
)

MAIN = """
pid nginx.pid;
error_log error.log warn;
events {}
http {
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include plants.conf;
}
"""


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
        command = [installed('nginx', 'nginx-light'), '-p', self.directory]
        subprocess.run([*command, '-c', 'nginx.conf', *arguments], check=True)

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
    assert '[emerg]' not in errors
    assert '[alert]' not in errors
    assert 'request body is buffered to a temporary file' not in errors
    assert TOKEN not in errors + nginx.log


@pytest.fixture(scope='module')
def service(nginx, tmp_path_factory):
    """The service, on the socket to which nginx connects and on a port."""
    directory = tmp_path_factory.mktemp('behind')
    variables = {
        'GUNICORN_CMD_ARGS': f'--bind 127.0.0.1:0 --bind unix:{nginx.upstream}',
        'PLANTS_METRICS': '1',
    }
    with Server(directory, workers=2, **variables) as service:
        yield service


def test_answers_of_the_service_pass_unchanged(service, nginx):
    """A plant that is sent three times is stored once; an Error has its message."""
    plant = fern()
    with nginx.connect() as client:
        for _ in range(3):
            answer = client.ask(request(body=plant))
            assert (answer.status, answer.json) == (200, {'name': 'Fern'})
        message = assert_error(client.ask(request(body=plant | {'id': 1.5})), 40005)
        assert message == 'id: 1.5 is not an integer'
        assert_error(client.ask(request(body=plant, authorization=None)), 40100)
    assert_error(nginx.ask(request(body=fern()), tls=False), 40000)  # plain HTTP
    assert_error(nginx.ask(request(body=b' ' * 65_536)), 40004)
    assert service.plants().count(plant) == 1


def test_only_the_page_and_the_description_are_compressed(service, nginx):
    """Large public files are compressed for clients that accept it, plants are not."""
    for target in ('/docs/swagger-ui.css', '/openapi.json', '/plants'):
        method, coding = ('POST', None) if target == '/plants' else ('GET', 'gzip')
        with nginx.connect() as client:
            client.send(request(method, target, fern(), accept_encoding='gzip'))
            answer = client.receive(head=True)
        assert (answer.status, answer.headers.get('content-encoding')) == (200, coding)


FAULTS = {
    'too large': (40003, request(body=b' ' * 65_537)),
    'too large in chunks': (40003, chunked(*[b' ' * 65_536] * 2)),
    'not HTTP': (40000, b'{}\r\n\r\n'),
    'no host': (40000, request(host=None)),
    'target too long': (41400, request(target='/' + 'x' * 9_000)),
    'header too long': (43100, request(x_long='x' * 9_000)),
    'TRACE': (40500, request('TRACE')),
    'TRACE of another path': (40500, request('TRACE', '/livez?a')),
    'HTTP/2.0': (40000, request(version='2.0')),
    'unknown coding': (50100, request(body=fern(), transfer_encoding='gzip')),
    'its own pages': (40400, request('GET', '/nginx-fault')),
}


@table(('value', 'data'), FAULTS)
def test_error_of_nginx_has_the_same_value(service, nginx, value, data):
    """A request that nginx refuses gets the error value of the service."""
    answer = nginx.ask(data)
    assert_error(answer, value)
    assert 'nginx' in answer.json['message']
    assert re.fullmatch('[0-9a-f]{32}', answer.headers['x-request-id'])
    if value == 40500:
        allowed = service.ask(data.replace(b'TRACE', b'PUT')).headers['allow']
        assert answer.headers['allow'] == allowed


def test_flood_of_one_address_is_limited(service, nginx):
    """Of many requests at once from an address some are refused; others are served."""
    data = b'GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n'
    answers = []
    while not any(answer.status == 503 for answer in answers):
        with ExitStack() as opened:  # nginx closes a connection after 1,000 requests
            connect = partial(nginx.connect, source='127.0.0.9')
            clients = [opened.enter_context(connect()) for _ in range(20)]
            for client in clients:
                client.send(data * 100)
            for client in clients:
                answers += [client.receive() for _ in range(100)]
            assert nginx.ask(request(body=fern())).status == 200
    refused = [answer for answer in answers if answer.status == 503]
    assert_error(refused[0], 50300)
    assert {answer.status for answer in answers} == {200, 503}


def test_open_requests_of_one_address_are_limited(service, nginx):
    """An address may have 100 requests open, and no more."""
    with ExitStack() as opened:
        for number in range(101):
            answer = nginx.ask(request('GET', '/livez'), source='127.0.0.8')
            assert answer.status == (200 if number < 100 else 503)
            client = opened.enter_context(nginx.connect(source='127.0.0.8'))
            client.send(request(body=b' ', content_length='9'))


def test_request_id_is_the_same_everywhere(service, nginx):
    """The client, the log of nginx and the log of the service have the same id."""
    answer = nginx.ask(request(body=fern(), x_request_id='from-the-client'))
    assert answer.headers['x-request-id'] == 'from-the-client'
    for sent in (None, 'not sane', 'x' * 200):
        answer = nginx.ask(request(body=fern(), x_request_id=sent))
        id = answer.headers['x-request-id']
        assert re.fullmatch('[0-9a-f]{32}', id)
        logged = f' {id} token-1 POST /plants 200 '
        wait_until(lambda: logged in service.log, 'the service logs it')  # noqa: B023
    wait_until(lambda: f' {id} POST /plants 200 ' in nginx.log, 'nginx logs it')


@pytest.mark.parametrize(
    'target',
    ['/plants?a=b', '//plants', '/plants%2f', '/metrics', '//metrics', '/%6detrics'],
)
def test_target_is_passed_unchanged(service, nginx, target):
    """A target has the status that it has without nginx; metrics are for Prometheus."""
    data = request('GET' if 'etrics' in target else 'POST', target, fern())
    assert nginx.ask(data).status == service.ask(data).status
    if 'etrics' in target:
        assert_error(nginx.ask(data, source='127.0.0.2'), 40400)


ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}'


class Handler(BaseHTTPRequestHandler):
    """Send the reply that the test names; close after one that is not ``ANSWER``."""

    protocol_version = 'HTTP/1.1'

    def do_POST(self):
        self.server.headers = self.headers
        received = self.server.received
        received.append(None)  # in the order of the heads
        number = len(received) - 1
        body = self.rfile.read(int(self.headers['Content-Length']))
        received[number] = json.loads(body)
        self.wfile.write(self.server.replies[number])
        self.close_connection = self.server.replies[number] != ANSWER


class Upstream(ThreadingMixIn, UnixStreamServer):
    """A server in place of the service, with a reply for each request."""

    daemon_threads = True

    def __init__(self, path, *replies):
        path.unlink(missing_ok=True)
        super().__init__(str(path), Handler)
        self.received = []
        self.replies = replies

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.01]).start()
        return self

    def __exit__(self, *exc_info):
        self.shutdown()  # returns when the thread is about to end
        self.server_close()


@pytest.fixture
def alone(tmp_path):
    """A running nginx without an upstream, until the test starts one."""
    with Nginx(tmp_path) as nginx:
        yield nginx


def test_missing_service_is_answered_503(alone):
    """Without the service, or if it ends meanwhile, the answer is 503."""
    answer = alone.ask(request('POST', '/plants?access_token=secret', fern()))
    assert_error(answer, 50300)
    logged = f' {answer.headers["x-request-id"]} POST /plants 503 '
    wait_until(lambda: logged in alone.log, 'it is logged, without the query')
    assert 'secret' not in alone.log
    for reply in (b'', b'HTTP/1.1 200 O'):  # it ends in a request, or in its response
        with Upstream(alone.upstream, reply):
            assert_error(alone.ask(request(body=fern())), 50300)
        # Now the socket exists, and no process listens.
        assert_error(alone.ask(request(body=fern())), 50300)


def test_request_on_a_closed_connection_is_retried(alone):
    """If a persistent connection turns out to be closed, the request is retried."""
    first, second = fern(), fern()
    with Upstream(alone.upstream, ANSWER, b'', ANSWER) as upstream:
        assert alone.ask(request(body=first)).status == 200
        assert alone.ask(request(body=second)).status == 200
        assert upstream.received == [first, second, second]


def test_slow_request_is_buffered(alone):
    """A slow request reaches the service only when complete, with a Content-Length."""
    slow, pieces, fast = fern(), fern(), fern()
    data = [request(body=slow), chunked(json.dumps(pieces).encode())]
    with (
        Upstream(alone.upstream, ANSWER, ANSWER, ANSWER) as upstream,
        alone.connect() as one,
        alone.connect() as other,
    ):
        one.send(data[0][:-1])
        other.send(data[1][:-1])
        assert alone.ask(request(body=fast)).status == 200
        one.send(data[0][-1:])
        assert one.receive().status == 200
        other.send(data[1][-1:])
        assert other.receive().status == 200
        assert upstream.received == [fast, slow, pieces]


def test_forged_headers_are_replaced(alone):
    """A client cannot forge the mount point, the scheme or its address."""
    forged = {'x_forwarded_proto': 'http', 'x_forwarded_for': '127.0.0.2', 'under': '/'}
    data = request(body=fern(), **forged).replace(b'under:', b'SCRIPT_NAME:')
    with Upstream(alone.upstream, ANSWER) as upstream:
        assert alone.ask(data).status == 200
        assert upstream.headers['X-Forwarded-Proto'] == 'https'
        assert upstream.headers['X-Forwarded-For'] == '127.0.0.1'
        assert 'SCRIPT_NAME' not in upstream.headers
