"""What the tests of the server send, and what they expect of each answer."""

import itertools
import json
import shutil
import time

import pytest
from server import REPOSITORY
from server import ROOMS
from server import TOKEN
from server import Server
from server import request

MAX_BODY = 65_536


SECRET = 'a-token-that-nobody-knows'


TAKEN = {'id': 0, 'name': 'Taken'}


QUICK = 1.0  # seconds; on a busy machine, for what takes a millisecond


PAGE = '/docs/swagger-ui-bundle.js'  # 1.6 MiB
# More time for an idle client than for a request.
SHORT = ['from serving import worker', 'worker.REQUEST_TIMEOUT = 1', 'keepalive = 3']

ids = itertools.count(1)


def fern(**members):
    """Return a plant that no other test adds."""
    return {'id': next(ids), 'name': 'Fern'} | members


def table(names, rows):
    """Parametrize with a dict, from ids to rows."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))


def chunked(*pieces, end=b'0\r\n\r\n', **how):
    """Return a request with a chunked body, one chunk a piece."""
    chunks = [b'%x\r\n%b\r\n' % (len(piece), piece) for piece in pieces]
    how.setdefault('transfer_encoding', 'chunked')
    return request(body=b''.join(chunks) + end, **how)


def assert_error(answer, value):
    """An answer is an ``Error`` with a value, and tells no secret."""
    assert (answer.status, answer.json['error']) == (value // 100, value), answer
    assert answer.json.keys() == {'error', 'message'}
    message = answer.json['message']
    assert len(message) > 5
    for secret in (TOKEN, SECRET, str(REPOSITORY), 'Traceback', '<html'):
        assert secret not in message
        assert secret not in str(answer.headers)


def ask_in_step(client, data, *, pipelined=True, head=False):
    """Return the answer to a complete request that leaves the connection in step.

    The connection serves the request that follows, or its end was announced and
    nothing that follows is answered.
    """
    following = request('GET', '/livez', x_request_id='following')
    client.send(data + following if pipelined else data)
    answer = client.receive(head=head)
    assert answer is not None, 'closed without an answer'
    if answer.announces_close:
        assert client.receive() is None, 'answered after the announced end'
    else:
        if not pipelined:
            client.send(following)
        next_answer = client.receive()
        assert next_answer is not None, 'closed without an announcement'
        assert next_answer.headers['x-request-id'] == 'following', 'out of step'
        assert next_answer.json == {'status': 'live'}
    return answer


def head(*lines):
    """Return the bytes of a head, whatever its lines are."""
    return '\r\n'.join([*lines, '', '']).encode('latin-1')


def assert_quick(server, rounds=10, between=lambda: None):
    """A healthy client is answered quickly, whatever the others do."""
    for _ in range(rounds):
        between()
        began = time.monotonic()
        with server.connect() as client:
            assert client.ask(request(body=fern())).status == 200
        assert time.monotonic() - began < QUICK


def edit(path, old, new):
    """Put a text in the place of another in a file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def objects(text):
    """Return the lines of a log, each of which is a JSON object."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {'time', 'level', 'pid', 'logger', 'message'} <= line.keys()
    return lines


@pytest.fixture(scope='session')
def service(tmp_path_factory):
    """The service with two workers, whose log shows no token and no accident."""
    with Server(tmp_path_factory.mktemp('server'), workers=2) as server:
        assert server.ask(request(body=TAKEN)).status == 200
        yield server
    assert TOKEN not in server.log
    assert SECRET not in server.log
    assert 'Traceback' not in server.log


@pytest.fixture
def connection(service):
    """A connection to the service."""
    with service.connect() as connection:
        yield connection


@pytest.fixture
def checkout(tmp_path):
    """A directory with what a checkout has, and no plants."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


@pytest.fixture
def copy(checkout):
    """A checkout whose files can be edited."""
    for link in list(checkout.iterdir()):
        original = link.resolve()
        link.unlink()
        if original.is_dir():
            shutil.copytree(original, link, ignore=shutil.ignore_patterns('*.pyc'))
        else:
            shutil.copy(original, link)
    return checkout
