"""Every value that an ``Error`` can have is reached by a request."""

import pytest
from conftest import TOKEN
from errors import FaultyStore, assert_error

from store import StoreUnavailable
from web.errors import ErrorValue
from web.tokens import Tokens

FERN, MOSS = {'id': 1, 'name': 'Fern'}, {'id': 1, 'name': 'Moss'}

REQUESTS = {
    ErrorValue.BAD_REQUEST: lambda client: client.send(b'{', content_length='1000'),
    ErrorValue.BODY_MISSING: lambda client: client.send(b''),
    ErrorValue.WRONG_MEDIA_TYPE: lambda client: client.add(FERN, content_type='a/b'),
    ErrorValue.BODY_TOO_LARGE: lambda client: client.send(b' ' * 65_537),
    ErrorValue.NOT_JSON: lambda client: client.send(b'{'),
    ErrorValue.NOT_A_NEW_PLANT: lambda client: client.add({'id': 1}),
    ErrorValue.ID_TAKEN: lambda client: client.add(FERN) and client.add(MOSS),
    ErrorValue.NO_TOKEN: lambda client: client.add(FERN, authorization=''),
    ErrorValue.INVALID_TOKEN: lambda client: client.add(FERN, authorization='Bearer x'),
    ErrorValue.NO_SUCH_PATH: lambda client: client.get('/nowhere'),
    ErrorValue.METHOD_NOT_ALLOWED: lambda client: client.get('/plants'),
}
FAULTS = {
    ErrorValue.INTERNAL: RuntimeError(),
    ErrorValue.STORE_UNAVAILABLE: StoreUnavailable('no space'),
}


@pytest.mark.parametrize('value', ErrorValue, ids=lambda value: value.name)
def test_every_value_is_answered_to_some_request(value, serve, store):
    """Each error value is the answer to some request, with its body and headers."""
    if value == ErrorValue.WRONG_SCOPE:
        tokens = Tokens.parse([f'prometheus {TOKEN} metrics'])
        answer = serve(store, tokens=tokens).add(FERN)
    elif value in FAULTS:
        answer = serve(FaultyStore(FAULTS[value])).add(FERN)
    else:
        answer = REQUESTS[value](serve(store))
    assert_error(answer, value)


def test_values_are_the_published_ones():
    """Clients depend on the numbers: none changes its meaning, none is removed."""
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
        'WRONG_SCOPE': 40300,
        'NO_SUCH_PATH': 40400,
        'METHOD_NOT_ALLOWED': 40500,
        'INTERNAL': 50000,
        'STORE_UNAVAILABLE': 50300,
    }
