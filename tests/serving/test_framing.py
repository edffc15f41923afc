"""Where a body ends: after it the connection answers the next request, or closes."""

import json

import pytest
from exchange import STORED_PLANT, ask_in_step, assert_error, chunked, fern, table
from server import TOKEN, request

# What is read otherwise from a socket; tests/http has the many cases of the contract.
REFUSED = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'body too large': (40003, request(body=b' ' * 65_537)),
    'deep JSON': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    'two tokens': (40101, request(body=fern(), authorization=[f'Bearer {TOKEN}'] * 2)),
}


@table('value, data', REFUSED)
def test_refused_request_stores_nothing(service, connection, value, data):
    """A refused request gets its error value and an id, and stores nothing."""
    before = service.lines()
    answer = ask_in_step(connection, data)
    assert_error(answer, value)
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
    assert service.ask(request(body=STORED_PLANT)).status == 200
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
