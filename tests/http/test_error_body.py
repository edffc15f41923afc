"""Every value that an ``Error`` can have is reached by a request."""

import json

import pytest
from errors import ERROR
from errors import assert_error

from store import StoreUnavailable
from store.memory import MemoryStore
from web.errors import ErrorValue
from web.errors import error_body

FERN = {'id': 1, 'name': 'Fern'}


class FailingStore(MemoryStore):
    """A store whose ``add`` raises what it was given."""

    def __init__(self, exception):
        super().__init__()
        self._exception = exception

    def add(self, plant):
        raise self._exception


def _of_client(request):
    """Turn a request that a client makes into one that makes its client first."""
    return lambda serve: request(serve(MemoryStore()))


def _without_token(client):
    client.authorization = None
    return client.add(FERN)


def _with_token(client, token):
    client.authorization = ('Bearer', token)
    return client.add(FERN)


def _twice(client, first, second):
    client.add(first)
    return client.add(second)


REQUESTS = {
    ErrorValue.BAD_REQUEST: _of_client(
        lambda client: client.send(b'{"id": 1', content_length='1000')
    ),
    ErrorValue.BODY_MISSING: _of_client(lambda client: client.send(b'')),
    ErrorValue.WRONG_MEDIA_TYPE: _of_client(
        lambda client: client.add(FERN, content_type='text/plain')
    ),
    ErrorValue.BODY_TOO_LARGE: _of_client(lambda client: client.send(b' ' * 65_537)),
    ErrorValue.NOT_JSON: _of_client(lambda client: client.send(b'{')),
    ErrorValue.NOT_A_NEW_PLANT: _of_client(lambda client: client.add({'id': 1})),
    ErrorValue.ID_TAKEN: _of_client(
        lambda client: _twice(client, FERN, {'id': 1, 'name': 'Moss'})
    ),
    ErrorValue.NO_TOKEN: _of_client(_without_token),
    ErrorValue.INVALID_TOKEN: _of_client(lambda client: _with_token(client, 'wrong')),
    ErrorValue.NO_SUCH_PATH: _of_client(lambda client: client.get('/nowhere')),
    ErrorValue.METHOD_NOT_ALLOWED: _of_client(lambda client: client.get('/plants')),
    ErrorValue.INTERNAL: lambda serve: serve(FailingStore(RuntimeError())).add(FERN),
    ErrorValue.STORE_UNAVAILABLE: (
        lambda serve: serve(FailingStore(StoreUnavailable('no space'))).add(FERN)
    ),
}


@pytest.mark.parametrize('value', ErrorValue, ids=lambda value: value.name)
def test_every_value_is_answered_to_some_request(value, serve):
    """Each value of the table is what some request is answered, in full form."""
    assert_error(REQUESTS[value](serve), value)


@pytest.mark.parametrize('value', ErrorValue, ids=lambda value: value.name)
def test_value_begins_with_its_status(value):
    """A value divided by 100 is the HTTP status it comes with."""
    assert value.status in {400, 401, 404, 405, 500, 503}
    assert 0 <= value - 100 * value.status < 100


def test_values_are_the_published_ones():
    """Clients depend on the numbers: none changes its meaning, none goes away."""
    assert {value.name: int(value) for value in ErrorValue} == {
        'BAD_REQUEST': 40000,
        'BODY_MISSING': 40001,
        'WRONG_MEDIA_TYPE': 40002,
        'BODY_TOO_LARGE': 40003,
        'NOT_JSON': 40004,
        'NOT_A_NEW_PLANT': 40005,
        'ID_TAKEN': 40006,
        'NO_TOKEN': 40100,
        'INVALID_TOKEN': 40101,
        'NO_SUCH_PATH': 40400,
        'METHOD_NOT_ALLOWED': 40500,
        'INTERNAL': 50000,
        'STORE_UNAVAILABLE': 50300,
    }


def test_server_can_make_an_error_without_a_request(client):
    """What the HTTP server refuses by itself gets the same body from one function."""
    body = error_body(41400, 'the request line is too long: "é"')
    ERROR.validate(json.loads(body))
    assert body == (
        '{"error": 41400, "message": "the request line is too long: \\"é\\""}'.encode()
    )
    assert client.get('/nowhere').body == error_body(40400, 'there is no such path')
