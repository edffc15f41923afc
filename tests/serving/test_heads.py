"""Request heads that are invalid or ambiguous are refused, never guessed."""

import time
from email.utils import format_datetime, parsedate_to_datetime
from itertools import product

import pytest
from exchange import SECRET, ask_in_step, assert_error, chunked, fern, raw_head, table
from server import PATIENCE, RawClient, Server, request, socket_to, wait_until


def heads(**more):
    """Return requests, by name, each with lines inserted after the request line."""
    return {
        name.replace('_', ' '): request(body=fern()).replace(
            b'\r\n', b'\r\n' + lines.encode() + b'\r\n', 1
        )
        for name, lines in more.items()
    }


TOO_MUCH = {
    'request line too long': (41400, request(target='/' + SECRET * 400)),
    'line without an end': (41400, SECRET.encode() * 8_000),
    'header too large': (43100, request(x=SECRET * 400)),
    'too many headers': (43100, request(**{f'x{n}': SECRET for n in range(200)})),
    'head without an end': (43100, request('GET', x=SECRET * 80_000)[:-4]),
    'expects something else': (41700, request(body=fern(), expect='200-ok')),
}

# A proxy might read these differently (RFC 9112, sections 2.2, 3, 5.2, 6.1).
SMUGGLED = {
    'bare line feeds': request(body=fern()).replace(b'\r\n', b'\n'),
    'one bare line feed': request(body=fern()).replace(b'\r\n', b'\n', 1),
    'bare line feed in a header': request(body=fern(), x='a\nContent-Length: 0'),
    'bare line feeds at the end': request('GET', '/livez')[:-4] + b'\n\n',
    'two spaces': raw_head('GET  /livez HTTP/1.1', 'Host: x'),
    'two spaces before the version': raw_head('GET /livez  HTTP/1.1', 'Host: x'),
    'no host': request(body=fern(), host=None),
    'two hosts': request(body=fern(), host=['localhost', 'localhost']),
    'two content types': request(body=fern(), content_type=['application/json'] * 2),
    'coding before chunked': chunked(b'{}').replace(b'chunked', b'gzip, chunked'),
    'coding behind chunked': chunked(b'{}').replace(b'chunked', b'chunked, gzip'),
    'coding without chunks': request(body=fern(), transfer_encoding='gzip'),
    'coding empty': request(body=fern(), transfer_encoding=''),
    'coding twice': request(body=b'0\r\n\r\n', transfer_encoding=['chunked'] * 2),
    'chunked in HTTP/1.0': chunked(b'{}', version='1.0'),
    **heads(
        folded='X: a\r\n b',
        folded_first=' X: a',
        name_with_a_space='Transfer-Encoding : chunked',
        carriage_return_in_a_value='X: a\rContent-Length: 0',
        NUL='X: a\0',
        vertical_tab_before_chunked='Transfer-Encoding: \x0bchunked',
    ),
}

NOT_HTTP = {
    'empty lines': b'\r\n\r\n\r\n',
    'no version': raw_head(f'GET /{SECRET}'),
    'version unknown': raw_head(f'GET /{SECRET} HTTP/9.9'),
    'version of FTP': raw_head('GET / FTP/1.1'),
    'method in small letters': raw_head('get / HTTP/1.1', f'A: {SECRET}'),
    'target with a space': raw_head(f'GET /{SECRET} {SECRET} HTTP/1.1'),
    'target relative': raw_head('GET plants HTTP/1.1'),
    'target not ASCII': raw_head(f'GET /plants?access_token={SECRET}\xff HTTP/1.1'),
    'target with half an address': raw_head(f'GET http://[?token={SECRET} HTTP/1.1'),
    'header without colon': raw_head('GET / HTTP/1.1', f'Authorization {SECRET}'),
    'HTTP/2': b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0',
    'TLS': b'\x16\x03\x01\0\xf4\x01\0\0\xf0\x03\x03',
}

REFUSED = (
    TOO_MUCH
    | {name: (40000, data) for name, data in SMUGGLED.items()}
    | {name: (40000, data) for name, data in NOT_HTTP.items()}
)


@table('value, data', REFUSED)
def test_bad_head_is_refused_and_ends_the_connection(service, connection, value, data):
    """A bad head gets an Error with an id and a date; the log has the id, no secret."""
    before = service.lines()
    connection.send(data + request(body=fern()))
    answer = connection.receive()
    assert_error(answer, value)
    assert answer.announces_close
    assert connection.receive() is None, 'the next request was answered'
    assert service.lines() == before
    made = parsedate_to_datetime(answer.headers['date'])
    assert answer.headers['date'] == format_datetime(made, usegmt=True)
    assert abs(time.time() - made.timestamp()) < PATIENCE
    id = answer.headers['x-request-id']
    wait_until(lambda: f'{id}: request refused' in service.log, 'it is logged')
    assert SECRET not in service.log


def test_incomplete_head_is_not_answered(connection):
    """A connection that ends in the middle of a head gets no answer."""
    connection.send(request(body=fern())[:40])
    connection.finish_sending()
    assert connection.receive() is None


def test_empty_line_before_a_request_is_ignored(connection):
    """One line end after a body, which old clients send, is ignored."""
    assert ask_in_step(connection, b'\r\n' + request(body=fern())).status == 200


CONNECTIONS = {
    'close first': ['close', 'keep-alive'],
    'close second': ['keep-alive', 'close'],
    'close in a list': ['x', 'y , Close ,z'],
}


@pytest.mark.parametrize('options', CONNECTIONS.values(), ids=CONNECTIONS)
def test_close_is_seen_wherever_it_stands(connection, options):
    """``close`` anywhere in the Connection headers ends the connection."""
    answer = ask_in_step(connection, request(body=fern(), connection=options))
    assert answer.status == 200
    assert answer.announces_close


HTTP_1_0 = {
    'no host': {'host': None},
    'expects': {'expect': '100-continue'},
    'close': {'connection': 'close'},
}


@pytest.mark.parametrize('headers', HTTP_1_0.values(), ids=HTTP_1_0)
def test_http_1_0_connection_ends_after_one_answer(connection, headers):
    """HTTP/1.0 needs no host, gets no interim answer, and ends as announced."""
    answer = ask_in_step(connection, request(body=fern(), version='1.0', **headers))
    assert answer.status == 200
    assert answer.announces_close


def test_http_1_0_connection_is_kept_on_request(connection):
    """An HTTP/1.0 client that asks for keep-alive keeps its connection."""
    data = request(body=fern(), version='1.0', connection='keep-alive')
    answer = ask_in_step(connection, data)
    assert answer.status == 200
    assert answer.headers['connection'] == 'keep-alive'


def test_header_named_like_a_wsgi_variable_is_dropped(tmp_path):
    """SCRIPT_NAME and the like are dropped, also from a proxy on this machine."""
    bound = ('--bind', '127.0.0.1:0', '--bind', f'unix:{tmp_path}/s')
    with (
        Server(tmp_path, *bound) as server,
        server.connect() as client,
        RawClient(over=socket_to(tmp_path / 's')) as proxy,
    ):
        named = ('SCRIPT_NAME: /x', 'PATH_INFO: /x', 'CONTENT_LENGTH: /x')
        for line, sender in product(named, (client, proxy)):
            data = heads(line=line)['line']
            assert ask_in_step(sender, data).status == 200


def test_path_outside_of_script_name_is_404(tmp_path):
    """With SCRIPT_NAME set, a path below it is served, and another one is 40400."""
    with Server(tmp_path, workers=None, SCRIPT_NAME='/api') as server:
        for _ in range(2):
            plant = fern()
            assert server.ask(request('POST', '/api/plants', plant)).status == 200
            for path in ('/plants', '/apiplants', '/apiplants/plants', '/', '//api'):
                answer = server.ask(request('POST', path, fern()))
                assert_error(answer, 40400)
                assert answer.announces_close
        assert server.plants()[-1] == plant
        assert len(server.plants()) == 2
        assert 'Traceback' not in server.log
