"""gunicorn's internals: the version that was checked, and heads that are known."""

import random
import re
from importlib import metadata
from pathlib import Path

import pytest
from gunicorn.config import Config
from gunicorn.http import errors

import serving
from serving import heads

CLIENT = ('127.0.0.1', 40_000)
LISTENER = ('127.0.0.1', 8000)
BODY = b'{"id": 1}'

REQUEST_LINES = 4 * [b'POST /a HTTP/1.1'] + [b'POST /A HTTP/1.1', b'POST / HTTP/1.0']
REQUEST_LINES += b'GET /  x', b''
LINES = [
    *[b'Host: a', b'Content-Length: 9', b'Connection: close', b'Accept: */*'],
    *[b'Transfer-Encoding: chunked', b'Expect: 100-continue', b' folded'],
    *[b'X_Request_Id: under', b'X-Request-Id: ', b'X-Request-Id: two words'],
    *[b'X-Request-Id : space', b'X-Request-Id: bare\nfeed', b'X-Request-Id: \xff'],
]
REQUEST_IDS = [b'X-Request-Id: one', b'x-request-id:two', b'X-REQUEST-ID: three\t']


class Bytes:
    """A client that has sent some bytes."""

    has_ended = False
    most = 3_000  # bytes at once
    wasted = 0

    def __init__(self, data):
        self._data = data
        self.sent = b''

    def recv(self, size):
        size = min(size, self.most)
        data, self._data = self._data[:size], self._data[size:]
        return data

    def sendall(self, data):
        self.sent += data


def make_settings(**changed):
    """Return settings under which a request id may matter to gunicorn."""
    settings = Config()
    dangerous = {'limit_request_fields': 3, 'header_map': 'dangerous'}
    for name, value in {'http_parser': 'python', **dangerous, **changed}.items():
        settings.set(name, value)
    return settings


def without_known_heads(**changed):
    """Return what reads every head as it came, and keeps none: there is a hook."""
    settings = make_settings(pre_request=lambda worker, request: None, **changed)
    exchanges = heads.Exchanges(settings)
    assert not exchanges._keeps
    return exchanges


def requests(exchanges, data):
    """Return what an application would see of each request, and how it ended."""
    seen = []
    client = Bytes(data)
    try:
        for request in exchanges.requests(client, CLIENT, LISTENER):
            request.read(exchanges._cfg)
            environ = exchanges.respond(request)[1]
            body = environ.pop('wsgi.input').read()
            for name in ('gunicorn.socket', 'wsgi.errors', 'wsgi.file_wrapper'):
                del environ[name]
            seen += [environ, body, request.headers, request.should_close()]
    except Exception as ex:
        seen.append(type(ex))
    return [*seen, client.sent]


def random_head(choose):
    """Return a head that may have request ids, and lines that make it refused."""

    def some(lines, chance):
        return [line for line in lines if choose.random() < chance]

    lines = some(LINES[:2], 0.9) + some(LINES[2:], 0.06) + some(REQUEST_IDS, 0.4)
    choose.shuffle(lines)
    before = some([b''], 0.1) + some(REQUEST_IDS, 0.05)
    lines = [*before, choose.choice(REQUEST_LINES), *lines]
    return b''.join(line + b'\r\n' for line in lines) + b'\r\n'


@pytest.mark.parametrize('seed', range(2))
def test_known_head_is_read_like_a_new_one(seed, monkeypatch):
    """A request means the same whatever the worker has read before it."""
    parse, parsed = heads.StrictRequest.parse_request_line, []

    def count(request, line):
        parsed.append(line)
        parse(request, line)

    monkeypatch.setattr(heads.StrictRequest, 'parse_request_line', count)
    choose = random.Random(seed)
    cold, warm = without_known_heads(), heads.Exchanges(make_settings())
    accepted = known = 0
    for _ in range(3000):
        data = random_head(choose) + BODY
        expected = requests(cold, data)
        parsed.clear()
        assert requests(warm, data) == expected, data
        accepted += len(expected) > 2
        known += len(expected) > 2 and not parsed
    assert accepted > 500
    assert known > 300


@pytest.mark.parametrize('size', [3_000, 5_000])
def test_only_few_and_short_heads_are_kept(size, monkeypatch):
    """A client that sends other heads all the time fills 1 MiB at most."""
    monkeypatch.setattr(Bytes, 'most', 8_192)
    exchanges = heads.Exchanges(make_settings(limit_request_fields=9))
    for number in range(300):
        value = b'%d' % number * (size // len(b'%d' % number))
        requests(exchanges, b'GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n' % value)
        assert len(exchanges._known) <= (256 if size < 4096 else 0)
    assert (size < 4096) == bool(exchanges._known)


@pytest.mark.parametrize(
    ('name', 'value', 'line'),
    [
        ('permit_obsolete_folding', True, b'X-Request-Id: a\r\n b'),
        ('limit_request_field_size', 50, b'X-Request-Id: ' + b'a' * 50),
        ('limit_request_field_size', 144, b'X-Request-Id: ' + b'a' * 128),
        ('limit_request_field_size', 143, b'X-Request-Id: ' + b'a' * 128),
    ],
)
def test_request_id_is_read_as_the_settings_say(name, value, line):
    """A request id is read like any header, also one that an operator limits."""
    changed = {'limit_request_fields': 9, name: value}
    cold = without_known_heads(**changed)
    warm = heads.Exchanges(make_settings(**changed))
    for sent in (b'X-Request-Id: a', line, line):
        data = b'GET / HTTP/1.1\r\nHost: a\r\n%b\r\nContent-Length: 0\r\n\r\n' % sent
        assert requests(warm, data) == requests(cold, data)


@pytest.mark.parametrize(
    ('name', 'value', 'begin'),
    [
        ('limit_request_line', 0, b'GET /'),
        ('limit_request_field_size', 0, b'GET / HTTP/1.1\r\nX: '),
        ('proxy_protocol', 'v1', b'PROXY '),
    ],
)
def test_head_is_limited_whatever_the_settings_say(name, value, begin):
    """A head of 32 KiB is read, and one that does not end is refused soon after."""
    exchanges = heads.Exchanges(make_settings(**{name: value}))
    client = Bytes(begin + b'a' * 100_000)
    with pytest.raises(errors.LimitRequestHeaders):
        next(exchanges.requests(client, CLIENT, LISTENER)).read(exchanges._cfg)
    assert len(client._data) > 50_000


def test_version_of_gunicorn_is_the_one_that_was_checked():
    """For another version, review each use of an internal."""
    assert metadata.version('gunicorn') == serving.CHECKED, (
        'gunicorn has another version: read what serving/__init__.py lists, see '
        'whether it is as it was, or a setting by now, and then change CHECKED'
    )


def test_modules_that_use_internals_are_listed():
    """Each module that imports gunicorn is in the list of serving/__init__.py."""
    listed = set(re.findall(r'^\* ``(\w+)``', serving.__doc__, re.M))
    modules = Path(serving.__file__).parent.glob('*.py')
    using = {path.stem for path in modules if 'from gunicorn' in path.read_text()}
    assert using <= listed
