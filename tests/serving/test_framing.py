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
    'one chunk': '{size:x}\r\n{body}\r\n0\r\n\r\n',
    'trailers': '{size:x}\r\n{body}\r\n0\r\nX-Sum: 1\r\nX-Day: 2\r\n\r\n',
    'extensions': '{size:x};a;b=c;d="e f"\r\n{body}\r\n0;g\r\n\r\n',
    'leading zeros': '000{size:X}\r\n{body}\r\n00\r\n\r\n',
}


@pytest.mark.parametrize('template', CHUNKED.values(), ids=CHUNKED)
def test_chunked_body_is_read(service, connection, template):
    """A chunked body is read like one with a length."""
    plant = fern()
    body = json.dumps(plant)
    data = chunked(end=template.format(size=len(body), body=body).encode())
    assert ask_in_step(connection, data).status == 200
    assert plant in service.plants()


def test_body_of_one_byte_chunks_is_read(service, connection):
    """A body may come in any number of chunks."""
    plant = fern()
    data = chunked(*(bytes([byte]) for byte in json.dumps(plant).encode()))
    assert ask_in_step(connection, data).status == 200
    assert plant in service.plants()


BROKEN_CHUNKS = {
    'size not hexadecimal': b'xyz\r\n{}\r\n0\r\n\r\n',
    'size negative': b'-2\r\n{}\r\n0\r\n\r\n',
    'size missing': b'\r\n{}\r\n0\r\n\r\n',
    'size with a prefix': b'0x2\r\n{}\r\n0\r\n\r\n',
    'no end of chunk': b'2\r\n{}XX0\r\n\r\n',
    'chunk longer than its size': b'2\r\n{}}}\r\n0\r\n\r\n',
    'extension broken': b'2;=\r\n{}\r\n0\r\n\r\n',
    'trailer broken': b'2\r\n{}\r\n0\r\nno colon\r\n\r\n',
    'trailer not allowed': b'2\r\n{}\r\n0\r\nContent-Length: 2\r\n\r\n',
}


@pytest.mark.parametrize('end', BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS)
def test_broken_chunks_end_the_connection(connection, end):
    """Broken chunks are 40000 and end the connection."""
    answer = ask_in_step(connection, chunked(end=end))
    assert_error(answer, 40000)
    assert answer.announces_close


CUT_OFF = {
    'in a chunk size': chunked(end=b'2'),
    'in a chunk': chunked(end=b'20\r\n{"id'),
    'before the last chunk': chunked(b'{"id":1,"name":"x"}', end=b''),
    'in the trailers': chunked(b'{"id":1,"name":"x"}', end=b'0\r\nX-Su'),
    'in a body with a length': request(body=fern(), content_length='1000'),
}


@pytest.mark.parametrize('data', CUT_OFF.values(), ids=CUT_OFF)
def test_body_that_ends_early_is_refused(service, connection, data):
    """A body that ends early is 40000, is not stored and ends the connection."""
    before = service.lines()
    connection.send(data)
    connection.finish_sending()
    answer = connection.receive()
    assert_error(answer, 40000)
    assert connection.receive() is None
    assert service.lines() == before
    assert answer.announces_close


@pytest.mark.parametrize('data', CUT_OFF.values(), ids=CUT_OFF)
def test_client_that_disconnects_in_a_body_stores_nothing(service, data):
    """A client that disconnects in the middle of a body stores nothing."""
    before = service.lines()
    with service.connect() as client:
        client.send(data)
    assert service.ask(request(body=STORED_PLANT)).status == 200
    assert service.lines() == before


INVALID_LENGTHS = {
    'negative': {'content_length': '-1'},
    'signed': {'content_length': '+30'},
    'not a number': {'content_length': 'ten'},
    'not ASCII digits': {'content_length': '\xb2'},
    'two': {'content_length': ['30', '31']},
    'two alike': {'content_length': ['30', '30']},
    'a list': {'content_length': '30, 30'},
    'thousands of digits': {'content_length': '9' * 5_000},
    'with chunks': {'content_length': '30', 'transfer_encoding': 'chunked'},
}


@pytest.mark.parametrize('headers', INVALID_LENGTHS.values(), ids=INVALID_LENGTHS)
def test_invalid_length_is_refused(connection, headers):
    """An invalid or ambiguous length is 40000 and ends the connection."""
    answer = ask_in_step(connection, request(body=fern(), **headers))
    assert_error(answer, 40000)
    assert answer.announces_close


def test_bytes_after_a_body_store_nothing(service, connection):
    """Bytes after the end of a body are never stored as a plant."""
    before = service.lines()
    smuggled = request(body=fern())
    connection.send(request(body=b'{"id":1' + smuggled, content_length='5'))
    assert_error(connection.receive(), 40004)
    assert_error(connection.receive(), 40000)
    assert connection.receive() is None
    assert service.lines() == before


def test_expectation_is_answered_with_100(service, connection):
    """A client that sends ``Expect: 100-continue`` gets 100 before its body."""
    plant = fern()
    head, _, body = request(body=plant, expect='100-continue').partition(b'\r\n\r\n')
    assert connection.ask(head + b'\r\n\r\n').status == 100
    assert ask_in_step(connection, body).status == 200
    assert plant in service.plants()


def test_pipelined_requests_are_answered_in_order(service, connection):
    """Pipelined requests are answered in their order, errors included."""
    plants = [fern(name=f'Fern {number}') for number in range(50)]
    bad = request(body=b'{}')
    connection.send(b''.join(request(body=plant) + bad for plant in plants))
    for plant in plants:
        assert connection.receive().json == {'name': plant['name']}
        assert_error(connection.receive(), 40005)
    assert [plant for plant in service.plants() if plant in plants] == plants


UNREAD = {
    '40100': (40100, {'authorization': None}),
    '40400': (40400, {'target': '/none'}),
    '40500': (40500, {'method': 'PUT'}),
    '40002': (40002, {'content_type': 'text/plain'}),
    '40003': (40003, {}),
}


@pytest.mark.parametrize('pipelined', [True, False], ids=['pipelined', 'in turn'])
@pytest.mark.parametrize('framing', [request, chunked], ids=['length', 'chunked'])
@pytest.mark.parametrize('size', [1_000, 65_535, 65_536, 100_000, 1_000_000])
@table('value, how', UNREAD)
def test_refused_body_leaves_the_connection_in_step(
    small_limit, value, how, size, framing, pipelined
):
    """A refused body of any size leaves the connection in step."""
    body = b'a' * size
    data = request(body=body, **how) if framing is request else chunked(body, **how)
    with small_limit.connect() as client:
        assert_error(ask_in_step(client, data, pipelined=pipelined), value)


def test_length_with_leading_zeros_is_a_length(connection):
    """Leading zeros do not change a Content-Length."""
    body = b'a' * 100_000
    data = request(body=body, content_length=f'{len(body):030}', authorization=None)
    answer = ask_in_step(connection, data)
    assert_error(answer, 40100)
    assert answer.announces_close
