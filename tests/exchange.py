"""Requests to the application or a server, checks of answers, servers as fixtures."""

import itertools
import json
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import Draft202012Validator
from machine import copy_checkout
from prometheus_client.parser import text_string_to_metric_families
from server import PATIENCE, REPOSITORY, TOKEN, Server, request, time_limits, wait_until

from app import create_app

with warnings.catch_warnings():
    # WebOb imports cgi, which warns that it will be removed.
    warnings.simplefilter('ignore', DeprecationWarning)
    from webtest import TestApp

OTHER = f'{TOKEN}r'  # one character longer; no message may show either
SECRET = 'a-token-that-nobody-knows'
ORIGIN = 'https://page.example'
LARGE_FILE = '/docs/swagger-ui-bundle.js'  # 1.6 MiB
# jsonschema itself reads the published file, with none of our code in between.
ERROR = Draft202012Validator(
    json.loads((REPOSITORY / 'schemas/Error.json').read_bytes())
)
CHALLENGES = {40100: 'Bearer', 40101: 'Bearer error="invalid_token"'}

ids = itertools.count(1)


def fern(**members):
    """Return a plant that no other test adds."""
    return {'id': next(ids), 'name': 'Fern'} | members


def table(names, rows):
    """Parametrize a test with a dict from test ids to rows."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))


def chunked(*pieces, end=b'0\r\n\r\n', **how):
    """Return a request with a chunked body, one chunk a piece."""
    chunks = [b'%x\r\n%b\r\n' % (len(piece), piece) for piece in pieces]
    how.setdefault('transfer_encoding', 'chunked')
    return request(body=b''.join(chunks) + end, **how)


class Client(TestApp):
    """A client of the application without a server; WebTest also checks WSGI."""

    def __init__(self, app, token=None):
        super().__init__(app)
        self.authorization = ('Bearer', token) if token else None

    def do_request(self, req, status=None, expect_errors=None):
        return super().do_request(req, status, expect_errors=True)

    def send(self, body, path='/plants', method='POST', **headers):
        """Send bytes; write header names with underscores; None leaves a header out."""
        headers = {'content_type': 'application/json', **headers}
        given = {name: text for name, text in headers.items() if text is not None}
        sent = {name.replace('_', '-'): text for name, text in given.items()}
        return self.request(path, method=method, body=body, headers=sent)

    def add(self, plant, **options):
        """Post a plant, or any other value, as JSON; the options are ``send``'s."""
        return self.send(json.dumps(plant).encode(), **options)


def assert_error(answer, value):
    """Check that an answer is a sound ``Error`` without secrets; return its message."""
    headers = {name.lower(): text for name, text in answer.headers.items()}
    error = json.loads(answer.body)
    ERROR.validate(error)
    assert error.keys() == {'error', 'message'}
    status = int(str(answer.status)[:3])  # WebTest adds the phrase
    assert (status, error['error']) == (value // 100, value), error['message']
    assert headers['content-type'] == 'application/json'
    assert headers['cache-control'] == 'no-store'
    assert headers.get('www-authenticate') == CHALLENGES.get(value)
    assert ('allow' in headers) == (value == 40500)
    assert ('retry-after' in headers) == (status == 503)
    assert int(headers.get('retry-after', 1)) > 0
    assert len(error['message']) > 5
    for secret in (TOKEN, SECRET, str(REPOSITORY), 'Traceback', '<html'):
        assert secret not in f'{error["message"]} {headers}'
    return error['message']


def ask_in_step(client, data, *, head=False):
    """Return the answer; check that the next one comes, or a close is announced."""
    following = request('GET', '/livez', x_request_id='following')
    # Not send(): it would hide that the server cuts off what it does not read.
    client._socket.sendall(data + following)
    answer = client.receive(head=head)
    assert answer is not None, 'closed without an answer'
    next_answer = client.receive()
    if answer.announces_close:
        assert next_answer is None, 'answered after Connection: close'
    else:
        assert next_answer is not None, 'closed without Connection: close'
        assert next_answer.headers['x-request-id'] == 'following', 'out of step'
        assert next_answer.json == {'status': 'live'}
    return answer


def receive_last(client):
    """Return the answer; check that it announces the end of its connection."""
    answer = client.receive()
    assert answer.announces_close
    assert client.receive() is None, 'answered after Connection: close'
    return answer


def raw_head(*lines):
    """Return the bytes of a request head with these lines, valid or not."""
    return '\r\n'.join([*lines, '', '']).encode('latin-1')


def assert_quick(client):
    """Check that a healthy client is answered quickly, whatever other clients do."""
    began = time.monotonic()
    assert client.ask(request(body=fern())).status == 200
    assert time.monotonic() - began < PATIENCE / 4  # it needs a millisecond


CROWD = 8  # clients
# What a client does after an answer: pause for some seconds, and keep its connection.
WAYS = (0, 'keep-alive'), (0, 'close'), (0.02, 'keep-alive')
# The rare long name makes a write of many pages, which a kill can tear.
NAMES = [*['Fern'] * 40, 'Färn🌿' * 2_000]


class Load:
    """Clients that add plants until the end of a ``with`` block."""

    def __init__(self, server):
        self._server = server
        # The plants that were answered with 200; clients without answer or connection.
        self.added, self.failed = [], []
        self._counts = [0] * CROWD
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(CROWD)

    def __enter__(self):
        self._clients = [self._pool.submit(self._run, n) for n in range(CROWD)]
        return self

    def __exit__(self, *exc_info):
        self._enough.set()
        for client in self._clients:
            client.result()

    def wait_for_all(self):
        """Wait until the server has answered one more plant of each client."""
        # Two more, because an answer from before this call may be counted after it.
        goals = [count + 2 for count in self._counts]

        def are_reached():
            assert not any(client.done() for client in self._clients)
            return all(map(int.__ge__, self._counts, goals))

        wait_until(are_reached, 'every client is served')

    def _run(self, number):
        pause, connection = WAYS[number % len(WAYS)]
        chance = random.Random(number)
        while not self._enough.is_set():
            try:
                with self._server.connect() as client:
                    is_kept = True
                    while is_kept and not self._enough.wait(pause):
                        plant = fern(name=chance.choice(NAMES))
                        answer = client.ask(request(body=plant, connection=connection))
                        if not answer:
                            raise ConnectionError
                        assert answer.status == 200, answer
                        is_kept = not answer.announces_close
                        self.added.append(plant)
                        self._counts[number] += 1
            except ConnectionError:  # the listening socket may close meanwhile
                self.failed.append(number)
                self._enough.wait(0.01)


def parse_samples(text):
    """Return the samples of an answer of /metrics, in which each family is once."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return [sample for family in families for sample in family.samples]


@pytest.fixture
def serve():
    """Return a function that returns a client, with the token, of a store."""

    def serve(store, **options):
        options.setdefault('tokens', {'tester': TOKEN})
        return Client(create_app(store, **options), TOKEN)

    return serve


@pytest.fixture
def client(serve, store):
    """Return a client of the store, with the token."""
    return serve(store)


@pytest.fixture
def anonymous(client):
    """Return a client of the same application, without a token."""
    return Client(client.app)


@pytest.fixture(scope='session')
def service(tmp_path_factory):
    """A server with two workers; its log must show no token and no traceback."""
    how = {'workers': 2, 'PLANTS_CORS_ORIGINS': ORIGIN}
    with Server(tmp_path_factory.mktemp('server'), **how) as server:
        assert server.ask(request(body=fern())).status == 200
        yield server
    assert TOKEN not in server.log
    assert SECRET not in server.log
    assert 'Traceback' not in server.log


@pytest.fixture(scope='session')
def impatient(tmp_path_factory):
    """A server with 2 s for a request and 60 s for an idle connection."""
    limits = time_limits(REQUEST_TIMEOUT=2)
    place = tmp_path_factory.mktemp('impatient')
    with Server(place, '--keep-alive=60', conf=limits) as server:
        yield server


@pytest.fixture(scope='session')
def secure(tmp_path_factory):
    """A server with TLS, and 2 s for a first byte and for a request."""
    limits = time_limits(FIRST_REQUEST=2, REQUEST_TIMEOUT=2)
    with Server(tmp_path_factory.mktemp('tls'), is_tls=True, conf=limits) as server:
        yield server
        assert 'Traceback' not in server.log


@pytest.fixture
def connection(service):
    """A connection to the service."""
    with service.connect() as connection:
        yield connection


@pytest.fixture
def checkout(tmp_path):
    """A directory with the files of a checkout, which can be edited."""
    copy_checkout(tmp_path)
    return tmp_path
