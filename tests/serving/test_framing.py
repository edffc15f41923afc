"""Where a body ends: after it the connection answers the next request, or closes."""

import json

import pytest
from exchange import STORED_PLANT, ask_in_step, assert_error, chunked, fern, table
from server import Server, request


@pytest.fixture(scope='module')
def small_limit(tmp_path_factory):
    """A server with a body limit that most bodies of these tests exceed."""
    directory = tmp_path_factory.mktemp('server')
    with Server(directory, PLANTS_MAX_BODY='100') as server:
        yield server


CHUNKED = {
    'trailers': b'%x\r\n%b\r\n0\r\nX-Sum: 1\r\nX-Day: 2\r\n\r\n',
    'extensions': b'%x;a;b=c;d="e f"\r\n%b\r\n0;g\r\n\r\n',
}


@table('template', CHUNKED)
def test_chunked_body_is_read(service, connection, template):
    """A chunked body is read like one with a length."""
    plant = fern()
    body = json.dumps(plant).encode()
    data = chunked(body[:9], end=template % (len(body[9:]), body[9:]))
    assert ask_in_step(connection, data).status == 200
    assert plant in service.plants()


INVALID = {
    'size not hexadecimal': chunked(end=b'xyz\r\n{}\r\n0\r\n\r\n'),
    'size with a prefix': chunked(end=b'0x2\r\n{}\r\n0\r\n\r\n'),
    'size missing': chunked(end=b'\r\n{}\r\n0\r\n\r\n'),
    'no end of chunk': chunked(end=b'2\r\n{}XX0\r\n\r\n'),
    'extension broken': chunked(end=b'2;=\r\n{}\r\n0\r\n\r\n'),
    'trailer not allowed': chunked(end=b'2\r\n{}\r\n0\r\nContent-Length: 2\r\n\r\n'),
    'length signed': request(body=fern(), content_length='+30'),
    'length twice': request(body=fern(), content_length=['30', '30']),
    'length of thousands of digits': request(content_length='9' * 5_000),
    'length and chunks': chunked(b'{}', content_length='30'),
}


@pytest.mark.parametrize('data', INVALID.values(), ids=INVALID)
def test_invalid_framing_is_refused(service, connection, data):
    """Broken chunks and ambiguous lengths are 40000, and end the connection."""
    before = service.lines()
    answer = ask_in_step(connection, data)
    assert_error(answer, 40000)
    assert answer.announces_close
    assert service.lines() == before


CUT_OFF = {
    'in a chunk': chunked(end=b'20\r\n{"id'),
    'before the last chunk': chunked(b'{"id":1,"name":"x"}', end=b''),
    'in the trailers': chunked(b'{"id":1,"name":"x"}', end=b'0\r\nX-Su'),
    'in a body with a length': request(body=fern(), content_length='1000'),
}


@pytest.mark.parametrize('data', CUT_OFF.values(), ids=CUT_OFF)
def test_body_that_ends_early_is_refused(service, connection, data):
    """A body that ends early is 40000 and not stored, also if the client is gone."""
    before = service.lines()
    with service.connect() as gone:
        gone.send(data)
    connection.send(data)
    connection.finish_sending()
    answer = connection.receive()
    assert_error(answer, 40000)
    assert answer.announces_close
    assert connection.receive() is None
    assert service.ask(request(body=STORED_PLANT)).status == 200
    assert service.lines() == before


READS_AGAIN = """
def app(environ, start_response):
    try:
        environ['wsgi.input'].read()
    except Exception:
        environ['wsgi.input'].read()
    start_response('200 OK', [('Content-Length', '2')])
    return [b'ok']
"""


def test_broken_body_that_is_read_again_ends_the_connection(tmp_path):
    """What follows broken chunks is no request, also if the application reads on."""
    (tmp_path / 'again.py').write_text(READS_AGAIN)
    with (
        Server(tmp_path, 'again:app', '-w1', workers=None) as server,
        server.connect() as client,
    ):
        client.send(chunked(end=b'xyz\r\n') + request('GET'))
        assert client.receive().announces_close
        assert client.receive() is None


def test_bytes_after_a_body_store_nothing(service, connection):
    """Bytes after the end of a body are never stored as a plant."""
    before = service.lines()
    smuggled = request(body=fern())
    connection.send(request(body=b'{"id":1' + smuggled, content_length='5'))
    assert_error(connection.receive(), 40004)
    assert_error(connection.receive(), 40000)
    assert connection.receive() is None
    assert service.lines() == before


def test_pipelined_requests_are_answered_in_order(service, connection):
    """Pipelined requests are answered in their order, errors included."""
    plants = [fern(name=f'Fern {number}') for number in range(50)]
    bad = request(body=b'{}')
    connection.send(b''.join(request(body=plant) + bad for plant in plants))
    for plant in plants:
        assert connection.receive().json == {'name': plant['name']}
        assert_error(connection.receive(), 40005)
    assert [plant for plant in service.plants() if plant in plants] == plants


@pytest.mark.parametrize('pipelined', [True, False], ids=['pipelined', 'in turn'])
@pytest.mark.parametrize('framing', [request, chunked], ids=['length', 'chunked'])
@pytest.mark.parametrize('size', [1_000, 60_000, 1_000_000])
def test_unread_body_leaves_the_connection_in_step(
    small_limit, size, framing, pipelined
):
    """A body of any size that the application does not read does no harm."""
    body = b'a' * size
    how = {'authorization': None}
    data = chunked(body, **how) if framing is chunked else request(body=body, **how)
    with small_limit.connect() as client:
        assert_error(ask_in_step(client, data, pipelined=pipelined), 40100)
