"""Where a body ends: then the next request is answered, or the connection ends."""

import json
import time
from contextlib import ExitStack

import pytest
from exchange import ask_in_step, assert_error, chunked, fern, receive_last, table
from machine import locked, stop
from server import PATIENCE, TOKEN, Server, request, wait_until

# What is read otherwise from a socket; tests/http has the many cases of the contract.
REFUSED = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'empty body': (40001, request()),
    'no media type': (40002, request(body=fern(), content_type=None)),
    'body too large': (40003, request(body=b' ' * 65_537)),
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
    assert answer.headers.get('allow', 'POST') == 'POST'
    assert answer.headers['x-request-id']
    assert service.lines() == before


def test_largest_body_is_stored_once_however_often_it_is_sent(service, connection):
    """A NewPlant, and its repeat, is answered as a Plant; HEAD has a length alone."""
    plant = fern(name='', tag='\U0001f33f')
    body = json.dumps(plant | {'notes': {'on': ['Monday']}}).encode().ljust(65_536)
    for _ in range(2):
        answer = ask_in_step(connection, request(body=body))
        assert (answer.status, answer.json) == (200, {'name': '', 'tag': plant['tag']})
    assert service.plants().count(plant) == 1
    head = ask_in_step(connection, request('HEAD', '/docs'), head=True)
    assert (head.status, int(head.headers['content-length']) > 0) == (200, True)


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
    assert service.ask(request('GET', '/readyz')).status == 200
    assert service.lines() == before


@pytest.mark.parametrize('pipelined', [True, False], ids=['pipelined', 'in turn'])
@pytest.mark.parametrize('framing', [request, chunked], ids=['length', 'chunked'])
@pytest.mark.parametrize('size', [1_000, 65_535, 65_536, 20 * 2**20])
def test_unread_body_leaves_the_connection_in_step(
    connection, size, framing, pipelined
):
    """A body that nobody reads does no harm; one of 64 KiB ends the connection."""
    body = b'a' * size
    how = {'authorization': None}
    data = chunked(body, **how) if framing is chunked else request(body=body, **how)
    answer = ask_in_step(connection, data, pipelined=pipelined)
    assert_error(answer, 40100)
    assert answer.announces_close == (size >= 65_536 or framing is chunked)


ENDLESS = {
    'length': (request(body=b' ', content_length=str(10**12)), b' ' * 65_536),
    'chunks': (
        request(content_type='application/json', transfer_encoding='chunked'),
        b'10000\r\n' + b' ' * 65_536 + b'\r\n',
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


def test_refused_body_is_read_away_while_it_comes_quickly(tmp_path):
    """A client that sends less than LINGER_RATE is cut off, one that sends more not."""
    lines = ['client.REQUEST_TIMEOUT = 3600', 'client.LINGER = 0.5']
    refused = request(content_length=10**12, authorization=None)
    with Server(tmp_path, conf=lines) as server, server.connect() as quick:
        assert quick.ask(refused).announces_close
        for _ in range(15):  # 1.3 MB/s
            quick._socket.sendall(bytes(2**17))
            time.sleep(0.1)
        with server.connect() as slow:
            assert slow.ask(refused).announces_close
            piece = bytes(2**10)  # at most 0.1 MB/s
            wait_until(lambda: time.sleep(0.01) or is_cut_off(slow, piece), 'it ends')


def test_request_that_has_begun_as_the_server_stops_is_answered(tmp_path):
    """A stop in a pipeline, or while a body is read: one more answer, with the end."""
    plants = [fern(), fern(), fern()]
    bodies = [json.dumps(plant).encode() for plant in plants]
    how = {'expect': '100-continue', 'content_type': 'application/json'}
    sent = [b''.join(request(body=plant) for plant in (plants[0], fern(), fern()))]
    sent += [request(body=bodies[1], **how), chunked(bodies[2], **how)]
    with Server(tmp_path) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in sent]
        with locked(tmp_path / 'plants.jsonl'):
            for client, data in zip(clients, sent, strict=True):
                client.send(data[:-10])
            for client in clients[1:]:
                assert client.receive().status == 100
            stop(server)
        for client, data in zip(clients, sent, strict=True):
            client.send(data[-10:])
            assert receive_last(client).status == 200
        assert server.wait() == 0
        assert server.plants() == plants
