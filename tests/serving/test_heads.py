"""Request heads that are invalid or ambiguous are refused, never guessed."""

import json
import re
import time
from email.utils import format_datetime, parsedate_to_datetime
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from exchange import (
    SECRET,
    ask_in_step,
    assert_error,
    chunked,
    fern,
    ids,
    raw_head,
    receive_last,
    table,
)
from machine import client_at
from server import PATIENCE, Server, request, wait_until

import serving

TOO_MUCH = {
    'line without an end': (41400, SECRET.encode() * 8_000),
    'head without an end': (43100, request('GET', x=SECRET * 80_000)[:-4]),
}

INVALID_HOSTS = [
    *('a b', 'u@a', '[::1', '::1', 'a/b', 'a:x', '<x>', '"a"', 'a\\b', 'a?b', 'a#b'),
    *('http://a', '\xff', 'a%zz', 'a, b', 'a:80:80', 'a%2', '[::1%eth0]', '[::1]a'),
    *('[1.2.3.4]', '[:::]', '[]', '[v1]', '[v1.]', '[vg.a]', 'a|b', 'a^b', '{a}'),
]
INVALID_TARGETS = [
    *('/livez#f', '/livez?a#b', '/livez?<', '/livez?>', '/livez?"', '/livez?\x7f'),
    *('/livez%', '/livez%2', *(f'/livez{raw}' for raw in '[]|^\\{}`')),
    *('http:///livez', 'http://', 'http://:80/livez', 'http://a:bad/livez', '*'),
    *('http://u@a/livez', 'http://[::1/livez', 'http://[::g]/livez', 'ftp://a/livez'),
    *('http://a b/livez', 'http://a\\livez', 'a/b://livez', 'localhost:80', 'livez'),
]
SOUND_HOSTS = [
    *('', 'a_b~c', 'a%20b', "A!$&'()*+,;=:", 'a:80', '1.2.3.4:8000', '[::1]'),
    *('[::ffff:1.2.3.4]:80', '[1:2:3:4:5:6:7::]:', '[v1.a:b]'),
]
SOUND_TARGETS = [
    *('/%6civez', '/livez?', "/livez?a/b?c:d@e%20!$&'()*+,;=-._~"),
    *('http://a/livez', 'HTTPS://[::1]:80/livez?a', 'http://a/livez?b[]=c|^\\{}`%'),
    *('/livez?a=b&c[]=d', '/livez?|^\\{}`', '/livez?%', '/livez?a=%zz&b=%2'),
]
SOUND = {
    **{host: {'host': host} for host in SOUND_HOSTS},
    **{target: {'target': target} for target in SOUND_TARGETS},
}


@pytest.mark.parametrize('how', SOUND.values(), ids=SOUND)
def test_sound_head_is_served(connection, how):
    """Every sound form of ``Host`` and of a request target is served."""
    how = {'method': 'GET', 'target': '/livez', **how}
    assert ask_in_step(connection, request(**how)).json == {'status': 'live'}


NOT_HTTP = {
    'empty lines': b'\r\n\r\n\r\n',
    'no version': raw_head(f'GET /{SECRET}'),
    'version to come': request('GET', version='1.2'),
    'version of HTTP/2': raw_head(f'GET /{SECRET} HTTP/2.0'),
    'method in small letters': raw_head(f'{SECRET} / HTTP/1.1'),
    'target with a space': raw_head(f'GET /{SECRET} {SECRET} HTTP/1.1'),
    'target not ASCII': raw_head(f'GET /plants?access_token={SECRET}\xff HTTP/1.1'),
    'target with half an address': raw_head(f'GET http://[?token={SECRET} HTTP/1.1'),
    'header without colon': raw_head('GET / HTTP/1.1', f'Authorization {SECRET}'),
    'bare line feeds': request(body=fern(), x=SECRET).replace(b'\r\n', b'\n'),
    'length and chunks': chunked(b'{}', content_length='30', x=SECRET),
    'coding inside of another': chunked(b'{}', transfer_encoding='gzip, chunked'),
    'CONNECT without a port': request('CONNECT', 'localhost'),
    'CONNECT to a path': request('CONNECT', '/livez'),
    **{f'host {host}': request('GET', host=host) for host in INVALID_HOSTS},
    **{f'target {target}': request('GET', target) for target in INVALID_TARGETS},
    'TLS': b'\x16\x03\x01\0\xf4\x01\0\0\xf0\x03\x03',
}

REFUSED = TOO_MUCH | {name: (40000, data) for name, data in NOT_HTTP.items()}


@table('value, data', REFUSED)
def test_bad_head_is_refused_and_ends_the_connection(service, connection, value, data):
    """A bad head gets an Error with an id and a date; the log has the id, no secret."""
    before = service.lines()
    connection.send(data + request(body=fern()))
    answer = receive_last(connection)
    assert_error(answer, value)
    assert service.lines() == before
    made = parsedate_to_datetime(answer.headers['date'])
    assert answer.headers['date'] == format_datetime(made, usegmt=True)
    assert abs(time.time() - made.timestamp()) < PATIENCE
    id = answer.headers['x-request-id']
    wait_until(lambda: f'{id}: request refused' in service.log, 'it is logged')
    assert SECRET not in service.log


def padded(size, *lines):
    """Return the head of a request with these lines, made so long with others."""
    head = request('GET', '/livez')[:-2] + b''.join(line + b'\r\n' for line in lines)
    while (missing := size - len(head) - 2) > 0:
        head += b'X: %b\r\n' % (b'a' * (min(missing, 6_000) - 5))
    return head + b'\r\n'


def with_trailers(size):
    """Return a request with trailers so long, with the empty line at their end."""
    lines = 7 * [b'X: '.ljust(4_094, b'a')] + [b'X: '.ljust(size - 28_676, b'a')]
    trailers = b'\r\n'.join([b'0', *lines, b'', b''])
    return chunked(json.dumps(fern()).encode(), end=trailers)


LIMITS = {
    'first line': (41400, 4_094, lambda n: request('GET', '/livez'.ljust(n - 13, '?'))),
    'header line': (43100, 8_190, lambda n: padded(0, b'X: '.ljust(n, b'a'))),
    'header lines': (43100, 100, lambda n: padded(0, *[b'X: a'] * (n - 2))),
    'head': (43100, 32_768, padded),
    'trailers': (40000, 32_768, with_trailers),
}


@table('value, limit, make', LIMITS)
def test_limit_is_where_the_page_says(connection, value, limit, make):
    """What is as long as a limit is served, and one byte or line more is refused."""
    assert ask_in_step(connection, make(limit)).status == 200
    assert_error(ask_in_step(connection, make(limit + 1)), value)


COUNTING = """
from gunicorn.http.message import Request

def parse(request, line, parse=Request.parse_request_line):
    print('a head is parsed', flush=True)
    parse(request, line)

Request.parse_request_line = parse
"""


def test_head_that_came_before_is_not_parsed_again(tmp_path):
    """Requests that differ in their id and body alone have their head parsed once."""
    lines = [COUNTING, 'permit_obsolete_folding = True']
    with Server(tmp_path, conf=lines) as server, server.connect() as client:
        parsed = []
        for id in ('one', 'two', 'three'):
            plant = {'id': len(parsed), 'name': 'Fern'}
            data = request(body=plant, x_request_id=id, expect='100-continue')
            assert client.ask(data).status == 100
            answer = client.receive()
            assert (answer.status, answer.headers['x-request-id']) == (200, id)
            parsed.append(server.log.count('a head is parsed'))
        assert parsed == parsed[:1] * 3
        assert len(server.plants()) == 3
        for strange in (['one', 'two'], 'one\r\n two') * 2:
            answer = client.ask(request('GET', x_request_id=strange))
            assert answer.status == 405
            assert not answer.headers['x-request-id'].startswith('one')
        old = request('GET', version='1.0', expect='100-continue')
        assert client.ask(old).status == 405


def test_settings_of_an_operator_limit_heads(tmp_path):
    """A limit for lines holds for ids; without limits there is that of 32 KiB."""
    options = ('--limit-request-field_size', '60')
    with Server(tmp_path, *options) as server, server.connect() as client:
        for id in ('a', 'b' * 40, 'a'):
            assert client.ask(request('GET', x_request_id=id)).status == 405
        assert_error(client.ask(request('GET', x_request_id='a' * 50)), 43100)
    options = ('--limit-request-field_size', '0', '--limit-request-line', '0')
    with Server(tmp_path, *options, '--proxy-protocol') as server:
        for begin in (b'GET /', b'GET / HTTP/1.1\r\nX: ', b'PROXY '):
            assert_error(server.ask(begin + b'a' * 100_000), 43100)


def test_gunicorn_is_the_version_whose_internals_were_checked():
    """Another version needs a review; the list has each module that uses internals."""
    assert metadata.version('gunicorn') == serving.CHECKED, (
        'gunicorn has another version: read what serving/__init__.py lists, see '
        'whether it is as it was, or a setting by now, and then change CHECKED'
    )
    listed = set(re.findall(r'^\* ``(\w+)``', serving.__doc__, re.M))
    modules = Path(serving.__file__).parent.glob('*.py')
    assert listed >= {x.stem for x in modules if 'from gunicorn' in x.read_text()}


def test_header_named_like_a_wsgi_variable_is_dropped(tmp_path):
    """SCRIPT_NAME and the like are dropped, also from a proxy on this machine."""
    bound = ('--bind', '127.0.0.1:0', '--bind', f'unix:{tmp_path}/s')
    with (
        Server(tmp_path, *bound) as server,
        server.connect() as client,
        client_at(tmp_path / 's') as proxy,
    ):
        named = ('SCRIPT_NAME: /x', 'PATH_INFO: /x', 'CONTENT_LENGTH: /x')
        for line, sender in product(named, (client, proxy)):
            name, value = line.encode().split(b': ')
            data = request(body=fern(), put_here=value.decode())
            data = data.replace(b'put-here', name)
            assert ask_in_step(sender, data).status == 200


OUTSIDE = ('/plants', '/apiplants', '/apiplants/plants', '/', '//api')
PAGE = 'https://page.example'
# Of a server with SCRIPT_NAME=/api.
REFUSED_AFTER_THE_HEAD = {
    **{path: (40400, {'target': path}) for path in OUTSIDE},
    'expectation': (41700, {'expect': '200-ok'}),
    'host': (40000, {'host': 'a b'}),
    'coding': (40000, {'transfer_encoding': 'gzip'}),
    'length': (40000, {'content_length': '+1'}),
}


@pytest.fixture(scope='module')
def mounted(tmp_path_factory):
    """A server with SCRIPT_NAME, whose answers the pages of an origin may read."""
    directory = tmp_path_factory.mktemp('server')
    environment = {'SCRIPT_NAME': '/api', 'PLANTS_CORS_ORIGINS': PAGE}
    with Server(directory, **environment, workers=None) as server:
        assert server.ask(request('GET', '/api/livez')).status == 200
        yield server
    assert 'Traceback' not in server.log
    assert not list(directory.glob('*.jsonl')) or not server.plants()


@table('value, how', REFUSED_AFTER_THE_HEAD)
@pytest.mark.parametrize('method', ['POST', 'HEAD', 'OPTIONS'])
def test_answer_of_the_server_is_like_one_of_the_application(
    mounted, method, value, how
):
    """What the server refuses has id, log line and CORS headers; HEAD has no body."""
    how = {'method': method, 'target': '/api/plants', 'body': fern(), **how}
    id = f'refused-{next(ids)}'
    browser = {'origin': PAGE, 'access_control_request_method': 'POST'}
    data = request(**how, **browser, x_request_id=id)
    with mounted.connect() as client:
        client.send(data + request('GET', '/api/livez'))
        answer = receive_last(client, head=method == 'HEAD')
    if method == 'HEAD':
        assert (answer.status, answer.body) == (value // 100, b'')
    else:
        assert_error(answer, value)
    assert answer.headers['x-request-id'] == id
    assert answer.headers['access-control-allow-origin'] == PAGE
    exposed = answer.headers['access-control-expose-headers']
    assert exposed == 'X-Request-Id, Retry-After'
    assert answer.headers['vary'] == 'Origin'
    logged = f'{id} - {method} {how["target"]} {value // 100} {value} '
    wait_until(lambda: logged in mounted.log, 'it is logged')
    wait_until(lambda: f'{id}: request refused' in mounted.log, 'its reason is, too')
