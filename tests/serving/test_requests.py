"""Each kind of request through a socket: what is served, what is refused, and why.

Every answer is followed by the answer to the next request, or by the announced end of
the connection. ``test_differential.py`` reads many more requests, without a socket.
"""

import json
import time
from email.utils import format_datetime, parsedate_to_datetime
from importlib import metadata

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
from server import PATIENCE, TOKEN, Server, request, wait_until

import serving

PROBE = request('GET', '/livez')
LONG = b' ' * 20 * 2**20
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


def test_host_and_target_have_the_forms_of_the_standard(service):
    """Every sound form is served, and every other one is refused."""
    expected = dict.fromkeys(SOUND_HOSTS + SOUND_TARGETS, 200)
    expected |= dict.fromkeys(INVALID_HOSTS + INVALID_TARGETS, 400)
    found = {
        text: service.ask(
            request('GET', '/livez', host=text)
            if text in SOUND_HOSTS + INVALID_HOSTS
            else request('GET', text)
        ).status
        for text in expected
    }
    assert found == expected


# Answered by the application, after which the connection goes on.
FAULTS = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'empty body': (40001, request()),
    'no media type': (40002, request(body=fern(), content_type=None)),
    'deep JSON': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    'no NewPlant': (40005, request(body=b'{}')),
    'no token': (40100, request(body=b'a' * 65_536, authorization=None)),
    'two tokens': (40101, request(body=fern(), authorization=[f'Bearer {TOKEN}'] * 2)),
    'no such path': (40400, request(target='/none', body=fern())),
    'other method': (40500, request('PUT', body=fern())),
}
# After these the connection ends.
LAST = {
    'body too large': (40003, request(body=b' ' * 65_537)),
    'chunk too large': (40003, chunked(b' ' * 65_537)),
    'chunks too large': (40003, chunked(*[b' ' * 6_554] * 10)),
    'long body': (40003, request(body=LONG)),
    'long body in chunks': (40003, chunked(LONG)),
    'long body, no token': (40100, request(body=LONG, authorization=None)),
    'line without an end': (41400, SECRET.encode() * 8_000),
    'head without an end': (43100, request('GET', x=SECRET * 80_000)[:-4]),
    'only empty lines': (40000, b'\r\n\r\n\r\n'),
    'no version': (40000, raw_head(f'GET /{SECRET}')),
    'later version': (40000, request('GET', version='1.2')),
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
}
BROKEN_CHUNKS = {
    'size with a sign': b'+1\r\nx\r\n',
    'size of the C language': b'0x1\r\nx\r\n',
    'no size': b'\r\n',
    'size of 17 digits': b'1' * 17 + b'\r\nx\r\n',
    'chunk longer than its size': b'1\r\nxy\r\n',
    'extension': b'1;=\r\nx\r\n',
    'bare line feed in a chunk': b'1\nx\r\n',
    'bare line feed in the end': b'0\r\nX: y\n\r\n',
    'folded trailer': b'0\r\nX: y\r\n z\r\n\r\n',
    'line without an end': b'1;' + b'x' * 5_000,
    'trailers without an end': b'0\r\n' + b'X: y\r\n' * 6_000,
    'many extensions': b'1;%b\r\nx\r\n' % (b'x' * 2_000) * 20,
}
LAST |= {name: (40000, chunked(b' ', end=x)) for name, x in BROKEN_CHUNKS.items()}


@table('value, data', FAULTS | LAST)
def test_bad_request_is_refused(service, connection, value, data):
    """It gets an Error with an id and a date, stores nothing, and shows no secret."""
    before = service.lines()
    answer = ask_in_step(connection, data)
    assert_error(answer, value)
    assert answer.announces_close == ((value, data) in LAST.values())
    assert service.lines() == before
    made = parsedate_to_datetime(answer.headers['date'])
    assert answer.headers['date'] == format_datetime(made, usegmt=True)
    assert abs(time.time() - made.timestamp()) < PATIENCE
    wait_until(lambda: answer.headers['x-request-id'] in service.log, 'it is logged')
    assert SECRET not in service.log


CUT_OFF = [
    chunked(end=b'20\r\n{"id'),
    chunked(b'{"id":1,"name":"x"}', end=b''),
    chunked(b'{"id":1,"name":"x"}', end=b'0\r\nX-Su'),
    request(body=fern(), content_length='1000'),
]


def test_body_that_ends_early_is_refused(service, subtests):
    """It is 40000, and stores nothing, also if the client has left."""
    before = service.lines()
    for data in CUT_OFF:
        with service.connect() as gone:
            gone.send(data)
        with subtests.test(data[-20:]), service.connect() as client:
            client.send(data)
            client.finish_sending()
            assert_error(receive_last(client), 40000)
    assert service.lines() == before


def padded(size, *lines):
    """Return the head of a request with these lines, made so long with others."""
    head = PROBE[:-2] + b''.join(line + b'\r\n' for line in lines)
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


def test_largest_body_is_stored_once_however_it_is_framed(service, connection):
    """A NewPlant, and its repeat, is answered as a Plant; HEAD has a length alone."""
    plant = fern(name='', tag='\U0001f33f')
    body = json.dumps(plant | {'notes': {'on': ['Monday']}}).encode().ljust(65_536)
    single = [body[at : at + 1] for at in range(len(body))]
    trailers = b'000;last="\\""\r\nX-Sum: 1\r\n\r\n'
    for data in (
        request(body=body),
        b'\r\n' + request(body=body, content_length='0065536'),
        request(body=body, connection='Upgrade, HTTP2-Settings', upgrade='h2c'),
        chunked(body, end=trailers),
        chunked(*single, transfer_encoding='Chunked'),
    ):
        answer = ask_in_step(connection, data)
        assert (answer.status, answer.json) == (200, {'name': '', 'tag': plant['tag']})
    assert service.plants().count(plant) == 1
    head = ask_in_step(connection, request('HEAD', '/docs'), head=True)
    assert (head.status, int(head.headers['content-length']) > 0) == (200, True)


def test_connection_is_kept_as_the_client_asks(service):
    """HTTP/1.1 keeps it unless asked to close, HTTP/1.0 the other way around."""
    for version, asked, is_kept in (
        ('1.1', None, True),
        ('1.1', 'x, Close', False),
        ('1.0', None, False),
        ('1.0', 'Keep-Alive', True),
    ):
        data = request(body=fern(), version=version, connection=asked)
        with service.connect() as client:
            answer = ask_in_step(client, data)
        assert (answer.status, answer.announces_close) == (200, not is_kept)


def test_client_that_waits_for_100_gets_it(connection):
    """100 comes if the body is wanted, not behind one that came or will be refused."""
    how = {'expect': '100-continue', 'content_type': 'application/json'}
    body = json.dumps(fern()).encode()
    data = request(body=body, **how)
    connection.send(data[: -len(body)])
    assert connection.receive().status == 100
    assert ask_in_step(connection, body).status == 200
    assert ask_in_step(connection, data).status == 200
    connection.send(chunked(**how, end=b''))
    assert connection.receive().status == 100
    assert ask_in_step(connection, b'1\r\n{\r\n0\r\n\r\n').status == 400
    connection.send(request(**how, content_length='65537'))
    assert_error(receive_last(connection), 40003)


def test_client_that_sends_its_last_byte_early_is_answered(connection):
    """A client may end its side of the connection behind its requests."""
    connection.send(PROBE + request(body=fern()) * 2)
    connection.finish_sending()
    assert [connection.receive().status for _ in range(3)] == [200] * 3
    assert connection.receive() is None


def test_gunicorn_is_the_version_whose_internals_were_checked():
    """Another version needs a review of what ``serving`` uses of it."""
    assert metadata.version('gunicorn') == serving.CHECKED


# To a server with SCRIPT_NAME=/api.
REFUSED_AFTER_THE_HEAD = [
    (40400, 'POST', {'target': '/plants'}),
    (40400, 'OPTIONS', {'target': '/apiplants/plants'}),
    (40400, 'HEAD', {'target': '//api'}),
    (41700, 'POST', {'expect': '200-ok'}),
    (40000, 'HEAD', {'host': 'a b'}),
    (40000, 'OPTIONS', {'transfer_encoding': 'gzip'}),
    (40000, 'POST', {'content_length': '+1'}),
]


def test_answer_of_the_server_is_like_one_of_the_application(tmp_path, subtests):
    """What the server refuses has id, log line and CORS headers; HEAD has no body."""
    page = 'https://page.example'
    browser = {'origin': page, 'access_control_request_method': 'POST'}
    settings = {'SCRIPT_NAME': '/api', 'PLANTS_CORS_ORIGINS': page}
    with Server(tmp_path, **settings) as server:
        assert server.ask(request('GET', '/api/livez')).status == 200
        for value, method, how in REFUSED_AFTER_THE_HEAD:
            id = f'refused-{next(ids)}'
            how = {'target': '/api/plants', 'body': fern(), **how, **browser}
            data = request(method, **how, x_request_id=id)
            with subtests.test(f'{method} {value}'), server.connect() as client:
                answer = ask_in_step(client, data, head=method == 'HEAD')
                assert answer.announces_close
                assert answer.status == value // 100
                if method == 'HEAD':
                    assert answer.body == b''
                else:
                    assert_error(answer, value)
                assert answer.headers['x-request-id'] == id
                assert answer.headers['access-control-allow-origin'] == page
                assert 'Retry-After' in answer.headers['access-control-expose-headers']
                line = f'{id} - {method} '
                wait_until(lambda line=line: line in server.log, 'it is logged')
