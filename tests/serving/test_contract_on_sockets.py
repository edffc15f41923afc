"""Each row of the contract once, over a real socket; tests/http has the many cases."""

import json

import pytest
from exchange import (
    MAX_BODY,
    SECRET,
    STORED_PLANT,
    ask_in_step,
    assert_error,
    chunked,
    fern,
    ids,
    table,
)
from server import TOKEN, request

ACCEPTED = {
    'every member': '{"id":ID,"name":"","tag":"\U0001f33f","notes":{"on":["Monday"]}}',
    'largest body': '{"id":ID,"name":"Fern"}'.ljust(MAX_BODY - 8),
}


@pytest.mark.parametrize('text', ACCEPTED.values(), ids=ACCEPTED)
def test_plant_is_stored_once_however_often_it_is_sent(service, connection, text):
    """A NewPlant, and its repeat, is answered as a Plant, and stored once."""
    body = text.replace('ID', str(next(ids))).encode()
    sent = json.loads(body)
    expected = {name: sent[name] for name in ('name', 'tag') if name in sent}
    for _ in range(2):
        answer = ask_in_step(connection, request(body=body))
        assert (answer.status, answer.json) == (200, expected)
        assert answer.headers['x-request-id']
    assert service.plants().count({'id': sent['id']} | expected) == 1


REFUSED = {
    'empty chunked body': (40001, chunked(content_type='application/json')),
    'empty body': (40001, request()),
    'no media type': (40002, request(body=fern(), content_type=None)),
    'other media type': (40002, request(body=fern(), content_type='text/plain')),
    'body too large': (40003, request(body=b' ' * (MAX_BODY + 1))),
    'not JSON': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    'no plant': (40005, request(body=b'{"id": 1.0, "name": "x"}')),
    'id is taken': (40006, request(body=STORED_PLANT | {'tag': 'other'})),
    'no token': (40100, request(target='/none', authorization=None)),
    'wrong token': (40101, request(body=fern(), authorization=f'Bearer {SECRET}')),
    'two tokens': (40101, request(body=fern(), authorization=[f'Bearer {TOKEN}'] * 2)),
    'no such path': (40400, request(target='/none', body=fern())),
    'other method': (40500, request('PUT', body=fern())),
}


@table('value, data', REFUSED)
def test_refused_request_has_its_value_and_stores_nothing(
    service, connection, value, data
):
    """A refused request gets its error value and headers, and stores nothing."""
    before = service.lines()
    answer = ask_in_step(connection, data)
    assert_error(answer, value)
    assert answer.headers.get('allow', 'POST') == 'POST'
    assert answer.headers['x-request-id']
    assert service.lines() == before


def test_head_is_answered_without_a_body(connection):
    """HEAD is answered without a body, with the length that GET would have."""
    answer = ask_in_step(connection, request('HEAD', '/docs'), head=True)
    assert answer.status == 200
    assert int(answer.headers['content-length']) > 0
