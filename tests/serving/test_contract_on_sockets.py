"""The contract over a real socket: one request of each kind, byte for byte."""

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
from server import TOKEN, Server, request, wait_until

ACCEPTED = {
    'name only': '{"id":ID,"name":"Fern"}',
    'smallest id': '{"id":-9223372036854775808,"name":"Fern"}',
    'largest id': '{"id":9223372036854775807,"name":"Fern"}',
    'empty texts': '{"id":ID,"name":"","tag":""}',
    'unknown member': '{"id":ID,"name":"Fern","height":{"cm":[30]}}',
    '64 levels': '{"id":ID,"name":"Fern","x":' + 63 * '[' + 63 * ']' + '}',
    'white space': ' \r\n\t{"id" : ID , "name" : "Fern"}\n',
    'escapes': '{"\\u0069d":ID,"name":"\\ud83c\\udf3f\\/"}',
    'raw UTF-8': '{"id":ID,"name":"\U0001f33f","tag":"\u2028"}',
    'as large as allowed': '{"id":ID,"name":"Fern"}'.ljust(MAX_BODY - 8),
}


@pytest.mark.parametrize('text', ACCEPTED.values(), ids=ACCEPTED)
def test_plant_is_stored_and_answered(service, connection, text):
    """A NewPlant is stored and answered as a Plant, without its id."""
    body = text.replace('ID', str(next(ids))).encode()
    sent = json.loads(body)
    expected = {name: sent[name] for name in ('name', 'tag') if name in sent}
    answer = ask_in_step(connection, request(body=body))
    assert (answer.status, answer.json) == (200, expected)
    assert {'id': sent['id']} | expected in service.plants()


REFUSED = {
    '40001 missing': (40001, request()),
    '40001 empty': (40001, request(content_length='0')),
    '40001 empty chunked': (40001, chunked(content_type='application/json')),
    '40002 other type': (40002, request(body=fern(), content_type='text/plain')),
    '40002 no type': (40002, request(body=fern(), content_type=None)),
    '40002 other charset': (
        40002,
        request(body=fern(), content_type='application/json; charset=latin-1'),
    ),
    '40002 encoded': (40002, request(body=fern(), content_encoding='gzip')),
    '40003': (40003, request(body=b' ' * (MAX_BODY + 1))),
    '40003 chunked': (
        40003,
        chunked(b' ' * MAX_BODY, b' ', content_type='application/json'),
    ),
    '40004 not UTF-8': (40004, request(body=b'{"id":1,"name":"\xff"}')),
    '40006': (40006, request(body=STORED_PLANT | {'tag': 'other'})),
    '40100': (40100, request(body=fern(), authorization=None)),
    '40101': (40101, request(body=fern(), authorization=f'Bearer {SECRET}')),
    '40100 before the path': (40100, request(target='/none', authorization=None)),
    '40400': (40400, request(target='/none', body=fern())),
    '40400 two slashes': (40400, request(target='//plants', body=fern())),
    '40400 below': (40400, request(target='/plants/1', body=fern())),
    '40500': (40500, request('PUT', body=fern())),
    '40004 deep': (40004, request(body=b'[' * 30_000 + b']' * 30_000)),
    '40005': (40005, request(body={'id': 1.5, 'name': 'x'})),
    '40005 fraction': (40005, request(body=b'{"id": 1.0, "name": "x"}')),
    '40005 exponent': (40005, request(body=b'{"id": 1e3, "name": "x"}')),
    '40005 true': (40005, request(body={'id': True, 'name': 'x'})),
    '40005 text': (40005, request(body={'id': '1', 'name': 'x'})),
    '40005 too large': (40005, request(body={'id': 2**63, 'name': 'x'})),
    '40005 too small': (40005, request(body={'id': -(2**63) - 1, 'name': 'x'})),
    '40005 no name': (40005, request(body={'id': 7})),
    '40005 null': (40005, request(body=fern(tag=None))),
    '40005 U+0000': (40005, request(body=fern(name='a\0b'))),
    '40004 NaN': (40004, request(body=b'{"id": NaN, "name": "x"}')),
    '40004 twice': (40004, request(body=b'{"id": 7, "id": 7, "name": "x"}')),
    '40004 surrogate': (40004, request(body=b'{"id": 7, "name": "\\ud800"}')),
    '40004 long number': (
        40004,
        request(body=b'{"id": %s, "name": "x"}' % (b'9' * 2_000)),
    ),
}


@table('value, data', REFUSED)
def test_refused_request_has_its_value_and_stores_nothing(
    service, connection, value, data
):
    """A refused request gets its error value, stores nothing and stays in step."""
    before = service.lines()
    assert_error(ask_in_step(connection, data), value)
    assert service.lines() == before


def test_repeated_plant_is_stored_once(service, connection):
    """A repeated plant is answered 200 and stored once."""
    plant = fern(tag='shade')
    for _ in range(3):
        assert connection.ask(request(body=plant)).status == 200
    assert service.plants().count(plant) == 1


CHALLENGES = {
    'no token': (request(authorization=None), 'Bearer'),
    'invalid token': (
        request(authorization=f'Bearer {SECRET}'),
        'Bearer error="invalid_token"',
    ),
}


@table('data, challenge', CHALLENGES)
def test_challenge_tells_missing_from_wrong(connection, data, challenge):
    """A 401 carries the challenge that tells a missing token from a wrong one."""
    assert connection.ask(data).headers['www-authenticate'] == challenge


@pytest.mark.parametrize('path', ['/livez', '/readyz'])
def test_probes_need_no_token(connection, path):
    """The probes need no token."""
    answer = ask_in_step(connection, request('GET', path, authorization=None))
    assert answer.status == 200


def test_missing_plant_file_is_503_until_it_is_back(tmp_path):
    """Adds are 503 while the plant file is missing, and 200 when it is back."""
    plants = tmp_path / 'plants.jsonl'
    with Server(tmp_path) as server, server.connect() as client:
        assert client.ask(request(body=fern())).status == 200
        plants.rename(tmp_path / 'away')
        for data in (request(body=fern()), request('GET', '/readyz')):
            answer = ask_in_step(client, data)
            assert_error(answer, 50300)
            assert int(answer.headers['retry-after']) > 0
        assert not plants.exists()
        (tmp_path / 'away').rename(plants)
        assert client.ask(request(body=fern())).status == 200


BROKEN_APPLICATION = f"""
from app import create_app
from store.memory import MemoryStore

class BrokenStore(MemoryStore):
    def add(self, plant):
        raise ZeroDivisionError('{SECRET}\\nsecond line')

app = create_app(BrokenStore(), tokens=['{TOKEN}'])
"""


def test_unexpected_fault_is_500_and_logged(tmp_path):
    """An unexpected exception is 500; its traceback is one line of the JSON log."""
    (tmp_path / 'broken.py').write_text(BROKEN_APPLICATION)
    with Server(tmp_path, 'broken:app', PLANTS_LOG='json') as server:
        with server.connect() as client:
            assert_error(ask_in_step(client, request(body=fern())), 50000)
        wait_until(lambda: 'Traceback' in server.log, 'it is logged')
    [line] = [
        line for line in map(json.loads, server.log.splitlines()) if 'exception' in line
    ]
    assert line['level'] == 'ERROR'
    assert line['exception'].startswith('Traceback')
    assert line['exception'].endswith(f'ZeroDivisionError: {SECRET}\nsecond line')


AUTHORIZATIONS = {
    'two good ones': ([f'Bearer {TOKEN}'] * 2, 40101),
    'a good one and a bad one': ([f'Bearer {TOKEN}', f'Bearer {SECRET}'], 40101),
    'a bad one and a good one': ([f'Bearer {SECRET}', f'Bearer {TOKEN}'], 40101),
    'another scheme and a good one': (['Basic YTpi', f'Bearer {TOKEN}'], 40100),
    'empty': ('', 40100),
    'scheme only': ('Bearer', 40100),
    'scheme and space': ('Bearer ', 40100),
    'token only': (TOKEN, 40100),
    'another scheme': (f'Basic {TOKEN}', 40100),
    'huge': (f'Bearer {SECRET * 300}', 40101),
    'not ASCII': ('Bearer \xe9\xff', 40101),
    'good one and more': (f'Bearer {TOKEN} more', 40101),
    'cut off': (f'Bearer {TOKEN[:-1]}', 40101),
}


@table('authorization, value', AUTHORIZATIONS)
def test_anything_but_one_good_token_is_401(service, connection, authorization, value):
    """Anything but exactly one valid token is 401."""
    before = service.lines()
    data = request(body=fern(), authorization=authorization)
    assert_error(ask_in_step(connection, data), value)
    assert service.lines() == before


@pytest.mark.parametrize('scheme', ['Bearer', 'bearer', 'BEARER', 'Bearer  '])
def test_scheme_is_accepted_in_any_case(connection, scheme):
    """The scheme may be in any case, with more than one space after it."""
    data = request(body=fern(), authorization=f'{scheme} {TOKEN}')
    assert ask_in_step(connection, data).status == 200


METHODS = {
    'OPTIONS': (request('OPTIONS'), 40500),
    'GET': (request('GET'), 40500),
    'BREW': (request('BREW'), 40500),
    'TRACE': (request('TRACE'), 40500),
    'OPTIONS *': (request('OPTIONS', '*'), 40400),
    'OPTIONS * without a token': (request('OPTIONS', '*', authorization=None), 40100),
    'CONNECT': (request('CONNECT', 'localhost:443'), 40400),
    'CONNECT without a token': (
        request('CONNECT', 'localhost:443', authorization=None),
        40100,
    ),
}


@table('data, value', METHODS)
def test_other_method_is_refused(connection, data, value):
    """Only POST is allowed on /plants; the 405 says so in its Allow header."""
    answer = ask_in_step(connection, data)
    assert_error(answer, value)
    assert answer.headers.get('allow') == ('POST' if value == 40500 else None)


@pytest.mark.parametrize(('path', 'status'), [('/livez', 200), ('/plants', 405)])
def test_head_has_no_body(connection, path, status):
    """HEAD is answered without a body, also when it is an error."""
    answer = ask_in_step(connection, request('HEAD', path), head=True)
    assert answer.status == status
    assert int(answer.headers['content-length']) > 0


@pytest.mark.parametrize('target', ['http://localhost/plants', '/plants?a=b'])
def test_target_may_be_absolute_or_have_a_query(service, connection, target):
    """A target may be absolute, and its query is ignored."""
    plant = fern()
    assert ask_in_step(connection, request('POST', target, plant)).status == 200
    assert plant in service.plants()


def test_log_names_tokens_and_never_shows_them(service, connection):
    """The log has the name of a token, the path and the status, never the token."""
    for authorization in (f'Bearer {TOKEN}', f'Bearer {SECRET}', SECRET):
        target = f'/plants?access_token={SECRET}'
        connection.ask(request('POST', target, fern(), authorization=authorization))
    assert 'token-1 POST /plants 200' in service.log
    assert TOKEN not in service.log
    assert SECRET not in service.log


def test_cross_origin_request_is_answered(tmp_path):
    """A preflight needs no token, and a page of the origin can read an error."""
    page = 'https://a.example'
    with Server(tmp_path, PLANTS_CORS_ORIGINS=page) as server:
        asked = {'origin': page, 'access_control_request_method': 'POST'}
        with server.connect() as client:
            client.send(request('OPTIONS', authorization=None, **asked))
            line = client._stream.readline()
            assert line == b'HTTP/1.1 204 No Content\r\n'
            assert client._headers()['access-control-allow-origin'] == page
            answer = client.ask(request(body={}, origin=page))
        assert (answer.status, answer.json['error']) == (400, 40005)
        assert answer.headers['access-control-allow-origin'] == page
