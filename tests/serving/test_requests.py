"""Each kind of request through a socket: what is served, what is refused, and why.

Every answer is followed by the answer to the next request, or by the announced end of
the connection. ``test_differential.py`` reads many more requests, without a socket.
"""

import json
import re

import exchange
from exchange import ORIGIN, SECRET, ask_in_step, assert_error, chunked, fern, raw_head
from server import TOKEN, Server, request, wait_until

PROBE = request('GET', '/livez')
BODY = b'{"id":1,"name":"x"}'
LONG = b' ' * 20 * 2**20
HOSTS = [
    *('', 'a_b~c', 'a%20b', "A!$&'()*+,;=:", 'a:80', '1.2.3.4:8000', '[::1]'),
    *('[::ffff:1.2.3.4]:80', '[1:2:3:4:5:6:7::]:'),
]
BAD_HOSTS = [
    *('a b', 'u@a', '[::1', '::1', 'a/b', 'a:x', '<x>', '"a"', 'a\\b', 'a?b', 'a#b'),
    *('http://a', '\xff', 'a%zz', 'a, b', 'a:80:80', 'a%2', '[::1%eth0]', '[::1]a'),
    *('[]', '[v1.a]', '[vg.a]', 'a|b', 'a^b', '{a}'),
]
TARGETS = [
    *('/%6civez', '/livez?', "/livez?a/b?c:d@e%20!$&'()*+,;=-._~"),
    *('http://a/livez', 'HTTPS://[::1]:80/livez?a', 'http://a/livez?b[]=c|^\\{}`%'),
    *('/livez?a=b&c[]=d', '/livez?|^\\{}`', '/livez?%', '/livez?a=%zz&b=%2', '/docs'),
    *('/readyz', '/openapi.json'),
]
BAD_TARGETS = [
    *('/livez#f', '/livez?a#b', '/livez?<', '/livez?>', '/livez?"', '/livez?\x7f'),
    *('/livez%', '/livez%2', *(f'/livez{raw}' for raw in '[]|^\\{}`')),
    *('http:///livez', 'http://', 'http://:80/livez', 'http://a:bad/livez', '*', ' /'),
    *('http://u@a/livez', 'http://[::1/livez', 'http://[::g]/livez', 'ftp://a/livez'),
    *('http://a b/livez', 'http://a\\livez', 'a/b://livez', 'localhost:80', 'livez'),
]
BAD_METHODS = ['', ' GET', 'get', 'G\0T']
BAD_PROTOCOLS = [
    *('', 'HTTP', 'HTTP/1.2', 'HTTP/2.0', 'HTTP/1.10', 'HTTP/01.1', 'HTTP/1.1 '),
    *('HTTP/1.1\r', 'http/1.1', 'RTSP/1.0', ' HTTP/1.1'),
]
BAD_LINES = [
    *('X', ':', ' X: a', 'X : a', 'X: a\0b', 'X: a\rb', 'X: a\nb', 'X: a\r\n b'),
    *('Host: b', 'Host:', 'X\xe4: a', 'Transfer-Encoding : chunked'),
    *(f'Content-Length: {text}' for text in ('3, 3', '+3', '0x3', '', '3 3', '3' * 20)),
    *(f'Transfer-Encoding: {text}' for text in ('gzip, chunked', '"chunked"', '')),
    *(f'Transfer-Encoding: {text}' for text in ('chunked, identity', '\vchunked')),
    'Content-Length: 3\r\nContent-Length: 3',
    'Content-Length: 3\r\nTransfer-Encoding: chunked',
]
BAD_CHUNKS = [
    *(b'+1\r\nx\r\n', b'0x1\r\nx\r\n', b'\r\n', b'1' * 17 + b'\r\nx\r\n'),
    *(b'1\r\nxy\r\n', b'1;=\r\nx\r\n', b'1\nx\r\n', b'0\r\nX: y\n\r\n'),
    *(b'0\r\nX: y\r\n z\r\n\r\n', b'0\r\n' + b'X: y\r\n' * 6_000),
    b'1;' + b'x' * 9_000 + b'\r\n \r\n0\r\n\r\n',
]


def test_what_the_grammar_does_not_have_is_refused(service):
    """Every sound host and target is served, everything else is refused with 400."""
    sound = [request('GET', '/livez', host=host) for host in HOSTS]
    sound += [request('GET', target, authorization=None) for target in TARGETS]
    bad = [request('GET', '/livez', host=host) for host in [*BAD_HOSTS, None]]
    bad += [request('GET', target) for target in BAD_TARGETS]
    bad += [raw_head(f'{method} /livez HTTP/1.1', 'Host: a') for method in BAD_METHODS]
    bad += [raw_head(f'GET /livez {text}', 'Host: a') for text in BAD_PROTOCOLS]
    bad += [raw_head('GET /livez HTTP/1.1', 'Host: a', line) for line in BAD_LINES]
    bad += [chunked(BODY, end=x, content_type='application/json') for x in BAD_CHUNKS]
    bad += [chunked(b'{}', version='1.0'), request(body=fern()).replace(b'\r', b'')]
    expected = dict.fromkeys(sound, 200) | dict.fromkeys(bad, 400)
    assert {x: service.ask(x + PROBE).status for x in expected} == expected


NAMES = ['', 'x' * 30_000, 'a\r\nSet-Cookie: x', '\x1b[31m\x7f\x85\u2028', ' a ']
NAMES += ['\ufeffFERN\uffff', 'A\u030a', '\xc5', '"\\u0041\\ud800\\0', '%00{0}</p>']


def test_plant_is_answered_and_stored_as_it_was_sent(service):
    """Without other members, as often as it is sent, unchanged; another is 40006."""
    extra = {'colour': 'green', 'ID': 2, 'soil': {'id': 3}, '': None}
    plants = [fern(name=name, tag=name) for name in NAMES] + [fern(name='Moss')]
    plants += [fern(id=id) for id in (-(2**63), 2**63 - 1, 2**53 + 1)]
    for plant in plants:
        texts = {name: text for name, text in plant.items() if name != 'id'}
        for same in plant | extra, plant, dict(reversed(plant.items())):
            assert service.ask(request(body=same)).json == texts
        for other in {'name': 'Oak'}, {'name': 'Oak', 'tag': 'sun'}:
            message = assert_error(service.ask(request(body=plant | other)), 40006)
            assert message.endswith(f': it differs in {", ".join(other)}')
        assert service.plants().count(plant) == 1
    del plants[0]['tag']
    assert 'in tag' in assert_error(service.ask(request(body=plants[0])), 40006)


FOREIGN = {'origin': ORIGIN, 'x_request_id': 'of-the-client'}
# Answered by the application, after which the connection goes on.
FAULTS = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'empty body': (40001, request()),
    'no media type': (40002, request(body=fern(), content_type=None)),
    'deep JSON': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    'no NewPlant': (40005, request(body=b'{}', **FOREIGN)),
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
    'other version': (40000, request('GET', SECRET, version='2.0')),
    'broken chunk': (40000, chunked(b' ', end=f'{SECRET}\r\n'.encode())),
    'expectation': (41700, request(body=b'{}', expect='200-ok', **FOREIGN)),
    'HEAD': (40000, request('HEAD', content_length='+1', **FOREIGN)),
    'TLS': (40000, b'\x16\x03\x01\0\xf4\x01\0\0\xf0\x03\x03'),
}


@exchange.table('value, data', FAULTS | LAST)
def test_bad_request_is_refused(service, connection, value, data):
    """It gets an Error with an id, stores nothing, and shows no secret."""
    before = service.plants()
    answer = ask_in_step(connection, data, head=data.startswith(b'HEAD'))
    if data.startswith(b'HEAD'):
        assert (answer.status, answer.body) == (value // 100, b'')
    else:
        assert_error(answer, value)
    assert answer.announces_close == ((value, data) in LAST.values())
    assert service.plants() == before
    id = answer.headers['x-request-id']
    if b'of-the-client' in data:
        assert id == 'of-the-client'
        assert answer.headers['access-control-allow-origin'] == ORIGIN
        assert 'Retry-After' in answer.headers['access-control-expose-headers']
    wait_until(lambda: re.search(f'{id} .* {value // 100} {value}', service.log))
    assert SECRET not in service.log


CUT_OFF = [chunked(BODY, end=end) for end in (b'', b'0\r\nX-Su')]
CUT_OFF += [chunked(end=b'20\r\n{"id')]


def test_body_that_ends_early_is_refused(service, subtests):
    """It is 40000, and stores nothing, also if the client has left."""
    before = service.plants()
    for data in [*CUT_OFF, request(body=fern(), content_length='1000')]:
        with service.connect() as gone:
            gone.send(data)
        with subtests.test(data[-20:]), service.connect() as client:
            client.send(data)
            client.finish_sending()
            assert_error(exchange.receive_last(client), 40000)
    assert service.plants() == before


MINIMAL = len(request('GET', '/livez', x=''))
# The requests are of so many bytes, or with so many lines of a header.
LIMITS = {
    'first line': (41400, 8_192, lambda n: request('GET', '/livez'.ljust(n - 13, '?'))),
    'lines': (43100, 100, lambda n: request('GET', '/livez', x=['a'] * (n - 2))),
    'head': (43100, 32_768, lambda n: request('GET', '/livez', x='a' * (n - MINIMAL))),
}


@exchange.table('value, limit, make', LIMITS)
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
    sent = [request(body=body), b'\r\n' + request(body=body, content_length='0065536')]
    sent += [request(body=body, connection='Upgrade, HTTP2-Settings', upgrade='h2c')]
    sent += [chunked(body, end=trailers), chunked(*single, transfer_encoding='Chunked')]
    for data in sent:
        answer = ask_in_step(connection, data)
        assert (answer.status, answer.json) == (200, {'name': '', 'tag': plant['tag']})
    assert service.plants().count(plant) == 1
    head = ask_in_step(connection, request('HEAD', '/docs'), head=True)
    assert (head.status, int(head.headers['content-length']) > 0) == (200, True)
    preflight = request('OPTIONS', origin=ORIGIN, access_control_request_method='PUT')
    assert ask_in_step(connection, preflight).status == 204


def test_connection_is_kept_as_the_client_asks(service):
    """HTTP/1.1 keeps it unless asked to close, HTTP/1.0 only if asked to keep it."""
    kept = [('1.1', None), ('1.0', 'Keep-Alive')]
    ended = [('1.1', 'x, Close'), ('1.0', None), ('1.0', 'Keep-Alive, close')]
    for version, asked in kept + ended:
        data = request(body=fern(), version=version, connection=asked)
        with service.connect() as client:
            answer = ask_in_step(client, data)
        expected = 200, (version, asked) in ended
        assert (answer.status, answer.announces_close) == expected


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
    assert_error(exchange.receive_last(connection), 40003)


def test_path_outside_the_mount_is_unknown(tmp_path):
    """With SCRIPT_NAME the paths below it are served, and no others."""
    with Server(tmp_path, SCRIPT_NAME='käfer/api/') as server:
        wait_until(lambda: 'fer/api/docs' in server.log, 'it is told')
        assert server.ask(request('GET', '/k%C3%A4fer/api/livez')).status == 200
        for target in ('/plants', '/k%C3%A4fer/apiplants/plants', '/', '//api'):
            assert_error(server.ask(request(target=target, body=fern())), 40400)
