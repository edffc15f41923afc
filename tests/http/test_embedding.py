"""The application under other WSGI servers, in threads and forks."""

import io
import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from http.client import parse_headers
from typing import NamedTuple
from wsgiref.headers import Headers
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import cheroot.wsgi
import pytest
import waitress.server
import waitress.wasyncore
from errors import assert_error
from server import PATIENCE, REPOSITORY, TOKEN, request

from app import create_app
from store import Plant, open_store

FERN = b'{"id": 1, "name": "Fern", "tag": "shade"}'
FERN_ANSWER = {'name': 'Fern', 'tag': 'shade'}
MAX_BODY = 200  # bytes; small, so that a larger body still goes out in one piece
TOO_LARGE = b' ' * MAX_BODY + b'{'
NO_TOKEN = {'authorization': None}


# ---- servers


@contextmanager
def in_thread(run, stop):
    """Run a server in a thread while the block lasts."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def served_by_waitress(application):
    """Yield the port where waitress serves an application."""
    sockets = {}
    server = waitress.server.create_server(
        application, map=sockets, host='127.0.0.1', port=0
    )

    def stop():
        # In the server's thread: closing a descriptor that it polls would be an error.
        server.trigger.pull_trigger(lambda: waitress.wasyncore.close_all(sockets))

    with in_thread(server.run, stop):
        yield server.effective_port
    server.task_dispatcher.shutdown()


@contextmanager
def served_by_cheroot(application):
    """Yield the port where cheroot serves an application."""
    server = cheroot.wsgi.Server(('127.0.0.1', 0), application, numthreads=2)
    server.expiration_interval = 0.02  # how soon it notices that it must stop
    server.prepare()
    with in_thread(server.serve, server.stop):
        yield server.bind_addr[1]


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format, *args):
        """Keep the access log out of the test report."""


@contextmanager
def served_by_wsgiref(application):
    """Yield the port where wsgiref serves an application."""
    with (
        make_server('127.0.0.1', 0, application, handler_class=QuietHandler) as server,
        in_thread(lambda: server.serve_forever(0.02), server.shutdown),
    ):
        yield server.server_port


SERVERS = {
    'waitress': served_by_waitress,
    'cheroot': served_by_cheroot,
    'wsgiref': served_by_wsgiref,
}
CHUNKED_DECODED_BY = ['waitress', 'cheroot']


@pytest.fixture
def start():
    """A function that serves an application until the test ends, and returns a port."""
    with ExitStack() as running:
        yield lambda server, application: running.enter_context(
            SERVERS[server](application)
        )


every_server = pytest.mark.parametrize('server', SERVERS)


# ---- clients


class Answer(NamedTuple):
    status_int: int
    headers: object
    body: bytes

    @property
    def text(self):
        return self.body.decode()

    @property
    def json(self):
        return json.loads(self.body)


def exchange(port, *arguments, **headers):
    """Send one request and return its answer, with all bytes up to the end.

    The request is sent in one piece: a server that answers before it has read the
    body, and then closes, would reset the connection of a client that still sends.
    """
    with socket.create_connection(('127.0.0.1', port), PATIENCE) as connection:
        connection.sendall(request(*arguments, connection='close', **headers))
        with connection.makefile('rb') as stream:
            status_line = stream.readline()
            answered = parse_headers(stream)
            return Answer(int(status_line.split()[1]), answered, stream.read())


def chunked(body, size=7):
    """Return a body in chunks."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b''.join(b'%x\r\n%b\r\n' % (len(piece), piece) for piece in [*pieces, b''])


def call(application, body=b'', **environ):
    """Call an application as a server would; a variable that is None is left out."""
    defaults = {
        'REQUEST_METHOD': 'POST',
        'SCRIPT_NAME': '',
        'PATH_INFO': '/plants',
        'QUERY_STRING': '',
        'CONTENT_TYPE': 'application/json',
        'CONTENT_LENGTH': str(len(body)),
        'HTTP_AUTHORIZATION': f'Bearer {TOKEN}',
        'wsgi.input': io.BytesIO(body),
    }
    environ = defaults | environ
    setup_testing_defaults(environ)
    environ = {name: value for name, value in environ.items() if value is not None}
    started = []
    pieces = application(environ, lambda *arguments: started.append(arguments))
    try:
        content = b''.join(pieces)
    finally:
        getattr(pieces, 'close', lambda: None)()
    [(status, headers)] = started
    return Answer(int(status.split()[0]), Headers(headers), content)


# ---- the application


@pytest.fixture
def application(store):
    """The application of a store; the test fails if it breaks a rule of WSGI."""
    return validator(make_application(store))


@pytest.fixture
def unchecked_app(store):
    """The same without the validator, which cheroot's chunked input does not pass."""
    return make_application(store)


def make_application(store):
    """Make the application of a store."""
    return create_app(store, tokens=[TOKEN], max_body_bytes=MAX_BODY)


# ---- under each server


@every_server
@pytest.mark.parametrize(
    ('method', 'path', 'body', 'headers', 'value'),
    [
        ('POST', '/plants', b'', {}, 40001),
        ('POST', '/plants', TOO_LARGE, {}, 40003),
        ('OPTIONS', '/livez', b'', NO_TOKEN, 40500),
    ],
)
def test_answers_are_valid_wsgi(
    start, application, store, server, method, path, body, headers, value
):
    """Each kind of answer reaches the client, and the WSGI validator finds no fault."""
    port = start(server, application)
    assert_error(exchange(port, method, path, body, **headers), value)
    assert not list(store)
    answer = exchange(port, 'POST', '/plants', FERN)
    assert (answer.status_int, answer.json) == (200, FERN_ANSWER)
    assert list(store) == [Plant(1, 'Fern', 'shade')]


@every_server
def test_head_has_no_body(start, application, server):
    """HEAD is answered as GET is, without the body."""
    port = start(server, application)
    for path, status in [('/livez', 200), ('/plants', 405)]:
        answer = exchange(port, 'HEAD', path)
        assert (answer.status_int, answer.body) == (status, b'')
        assert answer.headers['Content-Type'] == 'application/json'


# ---- chunked bodies


# RFC 9112, section 6.3: where both are sent, the chunks say how long the body is.
lengths = pytest.mark.parametrize(
    'length',
    [
        pytest.param({}, id='alone'),
        pytest.param({'content_length': '10'}, id='shorter-length'),
    ],
)


def exchange_chunked(port, body, **headers):
    """Post a body in chunks."""
    headers['transfer_encoding'] = 'chunked'
    return exchange(port, 'POST', '/plants', body, **headers)


@lengths
@pytest.mark.parametrize('server', CHUNKED_DECODED_BY)
def test_chunked_body_is_read(start, unchecked_app, store, server, length):
    """A chunked body is read where the server marks its end."""
    port = start(server, unchecked_app)
    answer = exchange_chunked(port, chunked(FERN), **length)
    assert (answer.status_int, answer.json) == (200, FERN_ANSWER)
    assert list(store) == [Plant(1, 'Fern', 'shade')]


@lengths
def test_chunked_body_that_is_not_decoded_is_40001(start, application, store, length):
    """Where the server does not decode chunks, the body is missing."""
    answer = exchange_chunked(start('wsgiref', application), chunked(FERN), **length)
    assert 'Content-Length' in assert_error(answer, 40001)
    assert not list(store)


def test_broken_chunks_are_40000(start, unchecked_app, store):
    """Chunks that the server cannot decode are 40000, not an error of the service."""
    port = start('cheroot', unchecked_app)
    answer = exchange_chunked(port, chunked(FERN).replace(b'7\r\n', b'seven\r\n'))
    assert_error(answer, 40000)
    assert not list(store)


# ---- what a server may leave out


@pytest.mark.parametrize('nothing', ['', None], ids=['empty', 'absent'])
@pytest.mark.parametrize(
    ('variable', 'value'),
    [
        ('PATH_INFO', 40400),
        ('CONTENT_LENGTH', 40001),
        ('CONTENT_TYPE', 40002),
        ('HTTP_AUTHORIZATION', 40100),
    ],
)
def test_empty_variable_is_like_an_absent_one(unchecked_app, variable, value, nothing):
    """An empty variable of the environ and an absent one mean the same."""
    environ = {'SCRIPT_NAME': '/garden', variable: nothing}
    assert_error(call(unchecked_app, FERN, **environ), value)


def test_query_and_prefix_may_be_absent(unchecked_app):
    """A plant is added without a query string and a prefix in the environ."""
    answer = call(unchecked_app, FERN, SCRIPT_NAME=None, QUERY_STRING=None)
    assert (answer.status_int, answer.json) == (200, FERN_ANSWER)


def test_chunked_body_may_have_an_empty_length(application):
    """A chunked body may come with an empty CONTENT_LENGTH."""
    environ = {'CONTENT_LENGTH': '', 'HTTP_TRANSFER_ENCODING': 'chunked'}
    assert_error(call(application, FERN, **environ), 40001)
    answer = call(application, FERN, **environ, **{'wsgi.input_terminated': True})
    assert (answer.status_int, answer.json) == (200, FERN_ANSWER)


# ---- processes


PREFORK = """
import os, signal, sys, threading
from webtest import TestApp
from app import create_app
from store import open_store

[url] = sys.argv[1:]
store = open_store(url)
plants = create_app(store, tokens=['prefork'])

def add(id, name):
    request = {'id': id, 'name': name}
    headers = {'Authorization': 'Bearer prefork'}
    answer = TestApp(plants).post_json(
        '/plants', request, headers=headers, expect_errors=True
    )
    assert answer.status_int == 200 or answer.json['error'] == 40006, answer
    return answer.status_int == 200

def add_own(first):
    for id in range(first, first + 100):
        assert add(id, 'own')

assert add(1, 'before')
threads = [threading.Thread(target=add_own, args=[n]) for n in (1000, 2000, 3000)]
for thread in threads:
    thread.start()
child = os.fork()
signal.alarm(10)  # a lock that stays held must not block the tests
add_own(4000 if child else 5000)
won = sum(add(id, 'parent' if child else 'child') for id in range(6000, 6200))
if child:
    for thread in threads:
        thread.join()
store.close()
os.write(1, f'{"parent" if child else "child"} {won}\\n'.encode())
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fork_loses_no_plant(tmp_path):
    """Parent and child go on with an application that threads used at the fork."""
    url = f'jsonl:{tmp_path / "plants.jsonl"}'
    result = subprocess.run(
        [sys.executable, '-Wignore::DeprecationWarning', '-c', PREFORK, url],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ''
    with open_store(url) as store:
        plants = list(store)
        store.ping()
    assert len({plant.id for plant in plants}) == len(plants)
    names = Counter(plant.name for plant in plants)
    won = dict(line.split() for line in result.stdout.splitlines())
    assert (names.pop('own'), names.pop('before')) == (500, 1)
    assert sum(names.values()) == 200
    assert {name: names[name] for name in won} == {n: int(w) for n, w in won.items()}
