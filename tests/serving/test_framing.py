"""Where a body ends: then the next request is answered, or the connection ends."""

import json
import time

import pytest
from exchange import ask_in_step, assert_error, chunked, fern, receive_last, table
from machine import count_sockets
from server import PATIENCE, TOKEN, Server, request, wait_until

# What is read otherwise from a socket; tests/http has the many cases of the contract.
REFUSED = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'empty body': (40001, request()),
    'no media type': (40002, request(body=fern(), content_type=None)),
    'body too large': (40003, request(body=b' ' * 65_537)),
    'chunk too large': (40003, chunked(b' ' * 65_537)),
    'chunks too large': (40003, chunked(*[b' ' * 6_554] * 10)),
    'deep JSON': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    'no NewPlant': (40005, request(body=b'{}')),
    'two tokens': (40101, request(body=fern(), authorization=[f'Bearer {TOKEN}'] * 2)),
    'no such path': (40400, request(target='/none', body=fern())),
    'other method': (40500, request('PUT', body=fern())),
}


@table('value, data', REFUSED)
def test_refused_request_stores_nothing(service, connection, value, data):
    """A refused request gets its error value and an id, and stores nothing."""
    before = service.lines()
    answer = ask_in_step(connection, data)
    assert_error(answer, value)
    assert answer.headers['x-request-id']
    assert answer.announces_close == (value == 40003)
    assert service.lines() == before


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


KEPT = {
    '1.1': ('1.1', {}, True),
    '1.1, close': ('1.1', {'connection': 'x, Close'}, False),
    '1.0': ('1.0', {}, False),
    '1.0, kept': ('1.0', {'connection': 'Keep-Alive'}, True),
}


@table('version, how, is_kept', KEPT)
def test_connection_is_kept_as_the_client_asks(connection, version, how, is_kept):
    """HTTP/1.1 keeps it unless asked to close, HTTP/1.0 the other way around."""
    answer = ask_in_step(connection, request(body=fern(), version=version, **how))
    assert answer.status == 200
    assert answer.announces_close is not is_kept


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


CUT_OFF = {
    'in a chunk': chunked(end=b'20\r\n{"id'),
    'before the last chunk': chunked(b'{"id":1,"name":"x"}', end=b''),
    'in the trailers': chunked(b'{"id":1,"name":"x"}', end=b'0\r\nX-Su'),
    'in a body with a length': request(body=fern(), content_length='1000'),
}
BROKEN = {
    'size with a sign': b'+1\r\nx\r\n',
    'size of the C language': b'0x1\r\nx\r\n',
    'no size': b'\r\n',
    'size of 17 digits': b'1' * 17 + b'\r\nx\r\n',
    'longer than its size': b'1\r\nxy\r\n',
    'extension': b'1;=\r\nx\r\n',
    'bare line feed': b'1\nx\r\n',
    'bare line feed in the end': b'0\r\nX: y\n\r\n',
    'folded trailer': b'0\r\nX: y\r\n z\r\n\r\n',
    'line without an end': b'1;' + b'x' * 5_000,
    'trailers without an end': b'0\r\n' + b'X: y\r\n' * 6_000,
    'many extensions': b'1;%b\r\nx\r\n' % (b'x' * 2_000) * 20,
}


@table(
    'data, is_cut',
    {
        **{name: (data, True) for name, data in CUT_OFF.items()},
        **{name: (chunked(b' ', end=data), False) for name, data in BROKEN.items()},
    },
)
def test_broken_body_is_refused(service, connection, data, is_cut):
    """A body that ends early, or has bad chunks, is 40000, also if the client left."""
    before = service.lines()
    with service.connect() as gone:
        gone.send(data)
    connection.send(data if is_cut else data + request(body=fern()))
    if is_cut:
        connection.finish_sending()
    assert_error(receive_last(connection), 40000)
    assert service.ask(request('GET', '/readyz')).status == 200
    assert service.lines() == before


@pytest.mark.parametrize('pipelined', [True, False], ids=['pipelined', 'in turn'])
@pytest.mark.parametrize('framing', [request, chunked], ids=['length', 'chunked'])
@pytest.mark.parametrize('size', [1_000, 65_536, 65_537, 20 * 2**20])
def test_unread_body_leaves_the_connection_in_step(
    connection, size, framing, pipelined
):
    """A body that nobody reads does no harm; one over the limit ends the connection."""
    body = b'a' * size
    data = (
        framing(body, authorization=None)
        if framing is chunked
        else (request(body=body, authorization=None))
    )
    answer = ask_in_step(connection, data, pipelined=pipelined)
    assert_error(answer, 40100)
    assert answer.announces_close == (size > 65_536)


ENDLESS = {
    'length': (request(body=b' ', content_length=str(10**12)), b' ' * 65_536),
    'chunks': (
        request(content_type='application/json', transfer_encoding='chunked'),
        b'10000\r\n' + b' ' * 65_536 + b'\r\n',
    ),
    'chunk': (
        request(content_type='application/json', transfer_encoding='chunked'),
        b'f' * 16 + b'\r\n' + b' ' * 65_536,
    ),
}


def is_cut_off(client, data):
    """Send something; return whether the server has ended the connection."""
    try:
        client._socket.sendall(data)
    except ConnectionError:
        return True


@table('head, piece', ENDLESS)
def test_endless_body_is_refused_at_once_and_cut_off(impatient, head, piece):
    """An endless body is refused at the limit, and cut off in time."""
    with impatient.connect() as client:
        client.send(head + piece + piece)
        assert client.is_readable(PATIENCE / 4)
        answer = client.receive()
        assert_error(answer, 40003)
        assert answer.announces_close
        wait_until(lambda: is_cut_off(client, piece), 'it is cut off')


def test_refused_body_is_read_away_while_it_comes(tmp_path):
    """A client that goes on to send is not cut off; when it pauses, it is."""
    lines = ['connection.REQUEST_TIMEOUT = 3600', 'connection.LINGER = 1']
    refused = request(content_length=10**12, authorization=None)
    with Server(tmp_path, conf=lines) as server:
        before = count_sockets(server)
        with server.connect() as client:
            assert client.ask(refused).announces_close
            for _ in range(15):
                client._socket.sendall(bytes(2**17))
                time.sleep(0.1)
            assert not is_cut_off(client, b' ')
            wait_until(lambda: count_sockets(server) <= before, 'it is closed')
