"""Request heads that are invalid or ambiguous are refused, never guessed."""

import re
import time
from email.utils import format_datetime, parsedate_to_datetime
from importlib import metadata
from itertools import product

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

INVALID_HOSTS = [
    *('a b', 'u@a', '[::1', '::1', 'a/b', 'a:x', '<x>', '"a"', 'a\\b', 'a?b', 'a#b'),
    *('http://a', '\xff', 'a%zz', 'a, b', 'a:80:80', 'a%2', '[::1%eth0]', '[::1]a'),
    *('[]', '[v1.a]', '[vg.a]', 'a|b', 'a^b', '{a}'),
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
    *('[::ffff:1.2.3.4]:80', '[1:2:3:4:5:6:7::]:'),
]
SOUND_TARGETS = [
    *('/%6civez', '/livez?', "/livez?a/b?c:d@e%20!$&'()*+,;=-._~"),
    *('http://a/livez', 'HTTPS://[::1]:80/livez?a', 'http://a/livez?b[]=c|^\\{}`%'),
    *('/livez?a=b&c[]=d', '/livez?|^\\{}`', '/livez?%', '/livez?a=%zz&b=%2'),
]


def test_sound_head_is_served(service, subtests):
    """Every sound form of ``Host`` and of a request target is served."""
    sound = [{'host': host} for host in SOUND_HOSTS]
    sound += [{'target': target} for target in SOUND_TARGETS]
    for how in sound:
        with subtests.test(**how), service.connect() as client:
            data = request(**{'method': 'GET', 'target': '/livez', **how})
            assert ask_in_step(client, data).json == {'status': 'live'}


REFUSED = {
    'line without an end': (41400, SECRET.encode() * 8_000),
    'head without an end': (43100, request('GET', x=SECRET * 80_000)[:-4]),
    'only empty lines': (40000, b'\r\n\r\n\r\n'),
    'no version': (40000, raw_head(f'GET /{SECRET}')),
    'version to come': (40000, request('GET', version='1.2')),
    'version of HTTP/2': (40000, raw_head(f'GET /{SECRET} HTTP/2.0')),
    'method in small letters': (40000, raw_head(f'{SECRET} / HTTP/1.1')),
    'target with a space': (40000, raw_head(f'GET /{SECRET} {SECRET} HTTP/1.1')),
    'header without colon': (40000, raw_head('GET / HTTP/1.1', f'X {SECRET}')),
    'header on two lines': (40000, request('GET', x=f'a\r\n {SECRET}')),
    'bare line feeds': (40000, request(body=fern(), x=SECRET).replace(b'\r\n', b'\n')),
    'bare carriage return': (40000, request('GET', x=f'a\r{SECRET}')),
    'NUL': (40000, request('GET', x=f'\0{SECRET}')),
    'no host': (40000, request('GET', host=None)),
    'two hosts': (40000, request('GET', host=['a', 'a'])),
    'two lengths': (40000, request(body=b'{}', content_length=['2', '2'])),
    'a list of lengths': (40000, request(body=b'{}', content_length='2, 2')),
    'length with a sign': (40000, request(body=b'{}', content_length='+2')),
    'length of 5,000 digits': (40000, request(body=b'{}', content_length='2' * 5_000)),
    'length and chunks': (40000, chunked(b'{}', content_length='30', x=SECRET)),
    'two codings': (40000, chunked(b'{}', transfer_encoding='gzip, chunked')),
    'chunks under HTTP/1.0': (40000, chunked(b'{}', version='1.0')),
    'expectation': (41700, request(body=b'{}', expect='200-ok')),
    'CONNECT': (40000, request('CONNECT', 'localhost:80')),
    'TLS': (40000, b'\x16\x03\x01\0\xf4\x01\0\0\xf0\x03\x03'),
    **{f'host {host}': (40000, request('GET', host=host)) for host in INVALID_HOSTS},
    **{f'target {it}': (40000, request('GET', it)) for it in INVALID_TARGETS},
}


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
    trailers = b'0\r\nX: ' + b'a' * (size - 7) + b'\r\n\r\n'
    return chunked(b'{"id": 1, "name": "Fern"}', end=trailers)


LIMITS = {
    'first line': (41400, 8_192, lambda n: request('GET', '/livez'.ljust(n - 13, '?'))),
    'header lines': (43100, 100, lambda n: padded(0, *[b'X: a'] * (n - 2))),
    'head': (43100, 32_768, padded),
    'trailers': (40000, 32_768, with_trailers),
}


@table('value, limit, make', LIMITS)
def test_limit_is_where_the_page_says(connection, value, limit, make):
    """What is as long as a limit is served, and one byte or line more is refused."""
    assert ask_in_step(connection, make(limit)).status == 200
    assert_error(ask_in_step(connection, make(limit + 1)), value)


def test_gunicorn_is_the_version_whose_internals_were_checked():
    """Another version needs a review of what ``serving`` uses of it."""
    assert metadata.version('gunicorn') == serving.CHECKED, (
        'gunicorn has another version: see whether what serving/ uses is as it was, or '
        'documented by now, and then change CHECKED'
    )


def test_header_named_like_a_wsgi_variable_is_dropped(tmp_path):
    """Names with an underscore are dropped, also from a proxy on this machine."""
    bound = ('--bind', '127.0.0.1:0', '--bind', f'unix:{tmp_path}/s')
    named = (b'SCRIPT_NAME', b'PATH_INFO', b'CONTENT_LENGTH', b'TRANSFER_ENCODING')
    with (
        Server(tmp_path, *bound) as server,
        server.connect() as client,
        client_at(tmp_path / 's') as proxy,
    ):
        for name, sender in product(named, (client, proxy)):
            data = request(body=fern(), put_here='/x').replace(b'put-here', name)
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
    logged = re.compile(f'{id} - {method} \\S+ {value // 100} {value} ')
    wait_until(lambda: logged.search(mounted.log), 'it is logged')
    wait_until(lambda: f'{id}: request refused' in mounted.log, 'its reason is, too')
