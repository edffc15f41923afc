"""The service behind nginx, with ``deploy/nginx.conf``."""

import json
import re
import shutil
import socket

import pytest
from exchange import assert_error, chunked, fern
from machine import edit
from rawclient import TOKEN, RawClient, request
from server import REPOSITORY, Server, free_port, installed, make_certificate
from waiting import PATIENCE, wait_until

TEMPORARY = ('client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi')
MAIN = 'pid nginx.pid; error_log stderr warn; events {} http { include plants.conf; '
MAIN += ' '.join(f'{name}_temp_path {name};' for name in TEMPORARY) + ' }\n'


class Nginx(Server):
    """nginx in a directory with the recipe, with other paths, port and host name."""

    port = None

    def __init__(self, directory):
        program = installed('nginx', 'nginx-light')
        command = program, '-p', directory, '-c', 'nginx.conf', '-g', 'daemon off;'
        super().__init__(directory, command=command, workers=None)
        self.upstream = directory / 'plants.sock'
        self.port = free_port()
        self.trust = make_certificate(directory)
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

    @property
    def requests(self):
        """Return the log of requests."""
        return (self.directory / 'access.log').read_text()


@pytest.fixture(scope='module')
def nginx(tmp_path_factory):
    """nginx, in front of any upstream that listens."""
    with Nginx(tmp_path_factory.mktemp('nginx')) as nginx:
        yield nginx
    assert '[alert]' not in nginx.log
    assert 'buffered to a temporary file' not in nginx.log
    assert TOKEN not in nginx.log + nginx.requests


@pytest.fixture(scope='module')
def service(nginx, tmp_path_factory):
    """The service, on the socket to which nginx connects and on a port."""
    addresses = f'--bind 127.0.0.1:0 --bind unix:{nginx.upstream}'
    directory = tmp_path_factory.mktemp('behind')
    with Server(directory, workers=2, GUNICORN_CMD_ARGS=addresses) as service:
        yield service


def test_answers_of_the_service_pass_unchanged(service, nginx):
    """A Plant and Errors, each with an id in both logs; plain HTTP is an Error."""
    plant = fern()
    with nginx.connect() as client:
        sent = [request(body=plant, x_request_id=id) for id in ('of-the-client', '?')]
        answers = [client.ask(data) for data in sent]
        assert [answer.json for answer in answers] == [{'name': 'Fern'}] * 2
        ids = [answer.headers['x-request-id'] for answer in answers]
        assert re.fullmatch('of-the-client [0-9a-f]{32}', ' '.join(ids))
        logged = [f' {id} POST /plants 200 ' for id in ids]
        wait_until(lambda: all(line in nginx.requests for line in logged))
        wait_until(lambda: all(id in service.log for id in ids))
        assert '1.5' in assert_error(client.ask(request(body={'id': 1.5})), 40005)
        assert_error(client.ask(request(body=plant, authorization=None)), 40100)
        assert_error(client.ask(request(body=b' ' * 65_536)), 40004)
    with RawClient(nginx.port) as client:
        assert_error(client.ask(request(body=plant)), 40000)


FAULTS = {40003: request(body=b' ' * 65_537), 40000: b'{}\r\n\r\n'}
FAULTS |= {41400: request(target='/' + 'x' * 9_000), 43100: request(x_long='x' * 9_000)}
FAULTS |= {40500: request('TRACE'), 50100: request(body=fern(), transfer_encoding='x')}


def test_error_of_nginx_has_the_same_value(service, nginx):
    """A request that nginx refuses gets the error value of the service."""
    for value, data in FAULTS.items():
        answer = nginx.ask(data)
        assert_error(answer, value)
        assert re.fullmatch('[0-9a-f]{32}', answer.headers['x-request-id'])


def test_flood_of_one_address_is_limited(service, nginx):
    """Of many requests of an address some are refused; others are served."""
    answers = []
    while not answers or answers[-1].status == 200:
        assert len(answers) < 10_000, 'nothing is refused'
        # nginx closes a connection after 1,000 requests.
        with RawClient(nginx.port, source='127.0.0.9', trust=nginx.trust) as client:
            client.send(request('GET', '/livez') * 500)
            answers += [client.receive() for _ in range(500)]
    assert nginx.ask(request(body=fern())).status == 200
    assert_error(answers[-1], 50300)
    assert {answer.status for answer in answers} == {200, 503}


def take(upstream, plant, answer=b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}'):
    """Receive the whole request with a plant from nginx and answer it."""
    upstream.settimeout(PATIENCE)
    data = b''
    while not data.endswith(b'}'):
        piece = upstream.recv(4096)
        assert piece, 'nginx closed the connection'
        data += piece
    assert json.loads(data.partition(b'\r\n\r\n')[2]) == plant
    upstream.sendall(answer)


def test_service_that_is_away_or_slow_or_closes(tmp_path):
    """Missing: 503; a closed kept connection: once more; a slow request: when whole."""
    one, two, slow, fast = fern(), fern(), fern(), fern()
    with Nginx(tmp_path) as nginx, socket.socket(socket.AF_UNIX) as listening:
        answer = nginx.ask(request('POST', '/plants?access_token=secret', fern()))
        assert_error(answer, 50300)
        logged = f' {answer.headers["x-request-id"]} POST /plants 503 '
        wait_until(lambda: logged in nginx.requests, 'it is logged, without the query')
        assert 'secret' not in nginx.requests
        listening.bind(str(nginx.upstream))
        listening.listen()
        listening.settimeout(PATIENCE)
        with nginx.connect() as client, nginx.connect() as other:
            client.send(request(body=one))
            with listening.accept()[0] as upstream:
                take(upstream, one)
                assert client.receive().status == 200
                client.send(request(body=two))
                take(upstream, two, b'')
            with listening.accept()[0] as upstream:
                take(upstream, two)
                assert client.receive().status == 200
                data = chunked(json.dumps(slow).encode())
                other.send(data[:-1])
                client.send(request(body=fast))
                take(upstream, fast)
                assert client.receive().status == 200
                other.send(data[-1:])
                take(upstream, slow)
                assert other.receive().status == 200
                client.send(request(body=one))
                listening.close()
                take(upstream, one, b'HTTP/1.1 200 O')
            assert_error(client.receive(), 50300)
