"""The service under gunicorn, byte for byte as a client sees it."""

import itertools
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextlib import suppress
from email.utils import format_datetime
from email.utils import parsedate_to_datetime

import pytest
from server import PATIENCE
from server import REPOSITORY
from server import ROOMS
from server import SCRIPTS
from server import TOKEN
from server import Server
from server import is_alive
from server import request
from server import wait_until

MAX_BODY = 65_536
SECRET = 'a-token-that-nobody-knows'
TAKEN = {'id': 0, 'name': 'Taken'}
QUICK = 1.0  # seconds; on a busy machine, for what takes a millisecond

ids = itertools.count(1)


def fern(**members):
    """Return a plant that no other test adds."""
    return {'id': next(ids), 'name': 'Fern'} | members


def table(names, rows):
    """Parametrize with a dict, from ids to rows."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))


def chunked(*pieces, end=b'0\r\n\r\n', **how):
    """Return a request with a chunked body, one chunk a piece."""
    chunks = [b'%x\r\n%b\r\n' % (len(piece), piece) for piece in pieces]
    return request(body=b''.join(chunks) + end, transfer_encoding='chunked', **how)


def with_json(text):
    """Return a request with a body as it is given, ``ID`` replaced by a new id."""
    return request(body=text.replace('ID', str(next(ids))).encode())


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    """The service with two workers, whose log shows no token and no accident."""
    with Server(tmp_path_factory.mktemp('server'), workers=2) as server:
        assert server.ask(request(body=TAKEN)).status == 200
        yield server
    assert TOKEN not in server.log
    assert SECRET not in server.log
    assert 'Traceback' not in server.log


@pytest.fixture(scope='module')
def narrow(tmp_path_factory):
    """The service with a limit that most bodies of these tests exceed."""
    directory = tmp_path_factory.mktemp('narrow')
    with Server(directory, PLANTS_MAX_BODY='100') as server:
        yield server


@pytest.fixture
def client(server):
    """A connection to the service."""
    with server.connect() as client:
        yield client


@pytest.fixture
def checkout(tmp_path):
    """A directory with what a checkout has, and no plants."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def assert_error(answer, value):
    """An answer is an ``Error`` with a value, and tells no secret."""
    assert (answer.status, answer.json['error']) == (value // 100, value), answer
    assert answer.json.keys() == {'error', 'message'}
    message = answer.json['message']
    assert len(message) > 5
    for secret in (TOKEN, SECRET, str(REPOSITORY), 'Traceback', '<html'):
        assert secret not in message
        assert secret not in str(answer.headers)


def ask_in_step(client, data, *, pipelined=True, head=False):
    """Return the answer to a complete request that leaves the connection in step.

    The connection serves the request that follows, or its end was announced and
    nothing that follows is answered.
    """
    following = request('GET', '/livez', x_request_id='following')
    client.send(data + following if pipelined else data)
    answer = client.receive(head=head)
    assert answer is not None, 'closed without an answer'
    if answer.announces_close:
        assert client.receive() is None, 'answered after the announced end'
    else:
        if not pipelined:
            client.send(following)
        next_answer = client.receive()
        assert next_answer is not None, 'closed without an announcement'
        assert next_answer.headers['x-request-id'] == 'following', 'out of step'
        assert next_answer.json == {'status': 'live'}
    return answer


# ---- the contract


DEEP = '{"id":ID,"name":"x","more":%s%s}'

ACCEPTED = {
    'name only': '{"id":ID,"name":"Fern"}',
    'with a tag': '{"id":ID,"name":"Fern","tag":"shade"}',
    'empty strings': '{"id":ID,"name":"","tag":""}',
    'unknown members': '{"id":ID,"name":"Fern","color":{"leaf":[1.5,null]}}',
    'smallest id': '{"id":-9223372036854775808,"name":"Fern"}',
    'largest id': '{"id":9223372036854775807,"name":"Fern"}',
    'white space': ' \r\n\t{"id" : ID , "name" : "Fern"}\n',
    'escapes': '{"\\u0069d":ID,"name":"\\ud83c\\udf3f\\/"}',
    '64 levels': DEEP % ('[' * 63, ']' * 63),
    'as large as allowed': '{"id":ID,"name":"Fern"}'.ljust(MAX_BODY - 8),
}


@pytest.mark.parametrize('text', ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(server, client, text):
    """A NewPlant is stored and answered as a Plant, without its id."""
    body = text.replace('ID', str(next(ids))).encode()
    sent = json.loads(body)
    expected = {name: sent[name] for name in ('name', 'tag') if name in sent}
    answer = ask_in_step(client, request(body=body))
    assert (answer.status, answer.json) == (200, expected)
    assert {'id': sent['id']} | expected in server.plants()


NOT_A_NEW_PLANT = {
    'id missing': '{"name":"x"}',
    'id above int64': '{"id":9223372036854775808,"name":"x"}',
    'id below int64': '{"id":-9223372036854775809,"name":"x"}',
    'id with a fraction': '{"id":1.0,"name":"x"}',
    'id with an exponent': '{"id":1e3,"name":"x"}',
    'id true': '{"id":true,"name":"x"}',
    'id a string': '{"id":"1","name":"x"}',
    'id null': '{"id":null,"name":"x"}',
    'name missing': '{"id":ID}',
    'name null': '{"id":ID,"name":null}',
    'name a number': '{"id":ID,"name":1}',
    'name with U+0000': '{"id":ID,"name":"a\\u0000"}',
    'tag null': '{"id":ID,"name":"x","tag":null}',
    'tag with U+0000': '{"id":ID,"name":"x","tag":"\\u0000"}',
    'array': '[]',
    'string': '"Fern"',
    'null': 'null',
}

NOT_JSON = {
    'nothing but space': ' ',
    'cut off': '{"id":ID,"name":"x"',
    'followed by more': '{"id":ID,"name":"x"}{}',
    'NaN': '{"id":ID,"name":"x","more":NaN}',
    'Infinity': '{"id":ID,"name":"x","more":-Infinity}',
    'a member twice': '{"id":ID,"name":"x","name":"x"}',
    'lone surrogate': '{"id":ID,"name":"\\ud800"}',
    'raw line feed in a string': '{"id":ID,"name":"\n"}',
    'byte order mark': '\ufeff{"id":ID,"name":"x"}',
    'thousands of levels': DEEP % ('[' * 30_000, ']' * 30_000),
    'thousands of digits': DEEP % ('1' * 60_000, ''),
}

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
    '40006': (40006, request(body=TAKEN | {'tag': 'other'})),
    '40100': (40100, request(body=fern(), authorization=None)),
    '40101': (40101, request(body=fern(), authorization=f'Bearer {SECRET}')),
    '40100 before the path': (40100, request(target='/none', authorization=None)),
    '40400': (40400, request(target='/none', body=fern())),
    '40400 two slashes': (40400, request(target='//plants', body=fern())),
    '40400 below': (40400, request(target='/plants/1', body=fern())),
    '40500': (40500, request('PUT', body=fern())),
    **{f'40004 {id}': (40004, with_json(text)) for id, text in NOT_JSON.items()},
    **{f'40005 {id}': (40005, with_json(text)) for id, text in NOT_A_NEW_PLANT.items()},
}


@table('value, data', REFUSED)
def test_refused(server, client, value, data):
    """What is not allowed is told by its value, stores nothing and harms no other."""
    before = server.lines()
    assert_error(ask_in_step(client, data), value)
    assert server.lines() == before


def test_same_plant_again(server, client):
    """A repeated plant is answered 200 and stored once."""
    plant = fern(tag='shade')
    for _ in range(3):
        assert client.ask(request(body=plant)).status == 200
    assert server.plants().count(plant) == 1


CHALLENGES = {
    'no token': (request(authorization=None), 'Bearer'),
    'invalid token': (
        request(authorization=f'Bearer {SECRET}'),
        'Bearer error="invalid_token"',
    ),
}


@table('data, challenge', CHALLENGES)
def test_challenge(client, data, challenge):
    """A 401 carries the challenge that tells a missing token from a wrong one."""
    assert client.ask(data).headers['www-authenticate'] == challenge


@pytest.mark.parametrize('path', ['/livez', '/readyz'])
def test_public(client, path):
    """The probes need no token."""
    answer = ask_in_step(client, request('GET', path, authorization=None))
    assert answer.status == 200


def test_store_unavailable(tmp_path):
    """While the plant file is gone adding is 503, and afterwards it goes on."""
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
        raise ZeroDivisionError('{SECRET}')

app = create_app(BrokenStore(), tokens=['{TOKEN}'])
"""


def test_unexpected_fault(tmp_path):
    """A fault of the service is 500, with its traceback in the log only."""
    (tmp_path / 'broken.py').write_text(BROKEN_APPLICATION)
    with Server(tmp_path, 'broken:app') as server, server.connect() as client:
        assert_error(ask_in_step(client, request(body=fern())), 50000)
        wait_until(lambda: 'ZeroDivisionError' in server.log, 'it is logged')
        assert 'Traceback' in server.log


HOSTILE_NAMES = [
    *('', ' ', '\t', '\n', '\r\n', '\x01', '\x1b[31m', '\x7f', '\x80', '\x85'),
    *('"', '\\', '\\"', '\\n', '\\u0041', '\\u0000', "'", '`', '/', '</script>'),
    *('"}\n{"id":-1,"name":"forged"}', '{"id":-2}', '[]', 'null', 'true', '-0', 'NaN'),
    *("'; DROP TABLE plants; --", '$(reboot)', '%s%n', '{0}', '%00', '../../etc', '#'),
    *('\u2028', '\u2029', '\ufeff', '\ufffe', '\uffff', '\ufffd', '\u202eevil', '\xa0'),
    *('é', 'e\u0301', 'ﬁ', 'ß', '中文', 'ไทย', '\U0001f33f', '\U0010ffff'),
    *('\U0001f469\u200d\U0001f33e', 'x' * 60_000),
]


@pytest.mark.parametrize('ascii_only', [True, False], ids=['escaped', 'raw'])
@pytest.mark.parametrize('name', HOSTILE_NAMES, ids=lambda name: ascii(name)[:30])
def test_hostile_name(server, client, name, ascii_only):
    """Any text comes back unchanged, in the answer and as raw UTF-8 in the file."""
    plant = fern(name=name)
    answer = ask_in_step(
        client, request(body=json.dumps(plant, ensure_ascii=ascii_only).encode())
    )
    assert (answer.status, answer.json['name']) == (200, name)
    assert plant in server.plants()
    raw = json.dumps(plant, ensure_ascii=False, separators=(',', ':')).encode()
    assert raw in server.lines()


# ---- HTTP: framing


CHUNKED = {
    'one chunk': '{size:x}\r\n{body}\r\n0\r\n\r\n',
    'trailers': '{size:x}\r\n{body}\r\n0\r\nX-Sum: 1\r\nX-Day: 2\r\n\r\n',
    'extensions': '{size:x};a;b=c;d="e f"\r\n{body}\r\n0;g\r\n\r\n',
    'leading zeros': '000{size:X}\r\n{body}\r\n00\r\n\r\n',
}


@pytest.mark.parametrize('template', CHUNKED.values(), ids=CHUNKED)
def test_chunked(server, client, template):
    """A chunked body is as good as one with a length."""
    plant = fern()
    body = json.dumps(plant)
    data = chunked(end=template.format(size=len(body), body=body).encode())
    assert ask_in_step(client, data).status == 200
    assert plant in server.plants()


def test_chunk_a_byte(server, client):
    """A body may come in any number of chunks."""
    plant = fern()
    data = chunked(*(bytes([byte]) for byte in json.dumps(plant).encode()))
    assert ask_in_step(client, data).status == 200
    assert plant in server.plants()


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
def test_broken_chunks(client, end):
    """Broken chunks are 40000 and end the connection."""
    answer = ask_in_step(client, chunked(end=end))
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
def test_client_stops_sending(server, client, data):
    """A body that ends too early is 40000, is not stored and ends the connection."""
    before = server.lines()
    client.send(data)
    client.finish_sending()
    answer = client.receive()
    assert_error(answer, 40000)
    assert client.receive() is None
    assert server.lines() == before
    assert answer.announces_close


@pytest.mark.parametrize('data', CUT_OFF.values(), ids=CUT_OFF)
def test_client_goes_away(server, data):
    """A client that goes away in the middle of a body leaves nothing behind."""
    before = server.lines()
    with server.connect() as client:
        client.send(data)
    assert server.ask(request(body=TAKEN)).status == 200
    assert server.lines() == before


LYING_LENGTHS = {
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


@pytest.mark.parametrize('headers', LYING_LENGTHS.values(), ids=LYING_LENGTHS)
def test_lying_length(client, headers):
    """A length that cannot be trusted is 40000 and ends the connection."""
    answer = ask_in_step(client, request(body=fern(), **headers))
    assert_error(answer, 40000)
    assert answer.announces_close


def test_length_too_short(server, client):
    """What is left of a body that is longer than it says is never taken for a plant."""
    before = server.lines()
    smuggled = request(body=fern())
    client.send(request(body=b'{"id":1' + smuggled, content_length='5'))
    assert_error(client.receive(), 40004)
    assert_error(client.receive(), 40000)
    assert client.receive() is None
    assert server.lines() == before


def test_date(client):
    """An answer tells when it was made (RFC 9110, section 6.6.1)."""
    answer = client.ask(request(body=fern()))
    made = parsedate_to_datetime(answer.headers['date'])
    assert answer.headers['date'] == format_datetime(made, usegmt=True)
    assert abs(time.time() - made.timestamp()) < PATIENCE


def test_expect_continue(server, client):
    """A client that asks before it sends its body is told to go on."""
    plant = fern()
    head, _, body = request(body=plant, expect='100-continue').partition(b'\r\n\r\n')
    assert client.ask(head + b'\r\n\r\n').status == 100
    assert ask_in_step(client, body).status == 200
    assert plant in server.plants()


def test_http_1_0(client):
    """An HTTP/1.0 connection ends after one answer, as it announces."""
    answer = ask_in_step(client, request(body=fern(), version='1.0'))
    assert answer.status == 200
    assert answer.announces_close


def test_http_1_0_keep_alive(client):
    """An HTTP/1.0 client that asks for it keeps its connection."""
    data = request(body=fern(), version='1.0', connection='keep-alive')
    answer = ask_in_step(client, data)
    assert answer.status == 200
    assert answer.headers['connection'] == 'keep-alive'


def test_http_1_0_expect(client):
    """An HTTP/1.0 client is never sent an interim answer."""
    data = request(body=fern(), version='1.0', expect='100-continue')
    assert client.ask(data).status == 200


def test_connection_close(client):
    """A client that wants the connection to end after its request gets that."""
    answer = ask_in_step(client, request(body=fern(), connection='close'))
    assert answer.status == 200
    assert answer.announces_close


def test_pipelined(server, client):
    """Requests that are sent together are answered in their order, faults included."""
    plants = [fern(name=f'Fern {number}') for number in range(50)]
    bad = request(body=b'{}')
    client.send(b''.join(request(body=plant) + bad for plant in plants))
    for plant in plants:
        assert client.receive().json == {'name': plant['name']}
        assert_error(client.receive(), 40005)
    assert [plant for plant in server.plants() if plant in plants] == plants


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
def test_unread_body(narrow, value, how, size, framing, pipelined):
    """A refused body of any size leaves the connection in step."""
    body = b'a' * size
    data = request(body=body, **how) if framing is request else chunked(body, **how)
    with narrow.connect() as client:
        assert_error(ask_in_step(client, data, pipelined=pipelined), value)


def test_unread_body_with_leading_zeros(client):
    """A body is as long as its length says, in however many digits."""
    body = b'a' * 100_000
    data = request(body=body, content_length=f'{len(body):030}', authorization=None)
    answer = ask_in_step(client, data)
    assert_error(answer, 40100)
    assert answer.announces_close


# ---- HTTP: heads


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
def test_authorization(server, client, authorization, value):
    """Anything but exactly one good token is 401."""
    before = server.lines()
    data = request(body=fern(), authorization=authorization)
    assert_error(ask_in_step(client, data), value)
    assert server.lines() == before


@pytest.mark.parametrize('scheme', ['Bearer', 'bearer', 'BEARER', 'Bearer  '])
def test_authorization_scheme(client, scheme):
    """The scheme is taken in any case, and with more than one space behind it."""
    data = request(body=fern(), authorization=f'{scheme} {TOKEN}')
    assert ask_in_step(client, data).status == 200


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
def test_other_method(client, data, value):
    """No method but POST does anything to /plants, and 405 tells which one does."""
    answer = ask_in_step(client, data)
    assert_error(answer, value)
    assert answer.headers.get('allow') == ('POST' if value == 40500 else None)


@pytest.mark.parametrize(('path', 'status'), [('/livez', 200), ('/plants', 405)])
def test_head(client, path, status):
    """HEAD is answered without a body, also when it is an error."""
    answer = ask_in_step(client, request('HEAD', path), head=True)
    assert answer.status == status
    assert int(answer.headers['content-length']) > 0


@pytest.mark.parametrize('target', ['http://localhost/plants', '/plants?a=b'])
def test_target(server, client, target):
    """A target may be absolute, and a query means nothing."""
    plant = fern()
    assert ask_in_step(client, request('POST', target, plant)).status == 200
    assert plant in server.plants()


def client_hello():
    """Return what a client that expects TLS sends first."""
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname='localhost'
    )
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def head(*lines):
    """Return the bytes of a head, whatever its lines are."""
    return '\r\n'.join([*lines, '', '']).encode('latin-1')


NOT_HTTP = {
    'request line too long': (41400, request(target='/' + SECRET * 400)),
    'header too large': (43100, request(x=SECRET * 400)),
    'token too large': (43100, request(authorization=f'Bearer {SECRET * 400}')),
    'too many headers': (43100, request(**{f'x{n}': SECRET for n in range(200)})),
    'head without end': (43100, request('GET', x=SECRET * 80_000)[:-4]),
    'expects something else': (41700, request(body=fern(), expect='200-ok')),
    'unknown coding': (
        {40000, 50100},
        request(body=fern(), transfer_encoding=SECRET, content_length=None),
    ),
    'coding without chunks': (40000, request(body=fern(), transfer_encoding='gzip')),
    'chunked twice': (40000, chunked(b'{}').replace(b'chunked', b'chunked, chunked')),
    'empty lines': (40000, b'\r\n\r\n\r\n'),
    'one word': (40000, head(SECRET)),
    'no version': (40000, head(f'GET /{SECRET}')),
    'version unknown': (40000, head(f'GET /{SECRET} HTTP/9.9')),
    'version of FTP': (40000, head('GET / FTP/1.1')),
    'method in small letters': (40000, head('get / HTTP/1.1', f'A: {SECRET}')),
    'method of symbols': (40000, head('G@T / HTTP/1.1', f'A: {SECRET}')),
    'target with a space': (40000, head(f'GET /{SECRET} {SECRET} HTTP/1.1')),
    'target relative': (40000, head('GET plants HTTP/1.1')),
    'target * for GET': (40000, head('GET * HTTP/1.1')),
    'target of NUL': (40000, head('GET /\0 HTTP/1.1')),
    'target not ASCII': (40000, head('GET /\xff HTTP/1.1')),
    'header without colon': (40000, head('GET / HTTP/1.1', f'Authorization {SECRET}')),
    'header name with space': (
        40000,
        head('GET / HTTP/1.1', f'Authorization : Bearer {SECRET}'),
    ),
    'header name missing': (40000, head('GET / HTTP/1.1', f': Bearer {SECRET}')),
    'header with NUL': (
        40000,
        head('GET / HTTP/1.1', f'Authorization: Bearer {SECRET}\0'),
    ),
    'header with CR': (
        40000,
        head('GET / HTTP/1.1', f'Authorization: Bearer {SECRET}\rx: y'),
    ),
    'two hosts': (40000, request(host=['localhost', SECRET])),
    'chunks in HTTP/1.0': (40000, chunked(b'{}', version='1.0')),
    'zeros': (40000, b'\0' * 100 + b'\r\n'),
    'HTTP/2': (40000, b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0'),
    'TLS': (40000, client_hello()),
}


@table('values, data', NOT_HTTP)
def test_not_http(client, values, data):
    """What is not HTTP, or too much of it, is an Error too, and ends the connection."""
    client.send(data)
    answer = client.receive()
    assert answer.json['error'] in (values if isinstance(values, set) else {values})
    assert_error(answer, answer.json['error'])
    assert answer.announces_close
    assert client.receive() is None


def test_bare_line_feeds(client):
    """Lines that end in a bare LF are read as lines or refused, and never mixed up."""
    data = request(body=fern()).replace(b'\r\n', b'\n')
    answer = ask_in_step(client, data)
    if answer.status != 200:
        assert_error(answer, 40000)


@pytest.mark.parametrize('parser', ['fast', 'python'])
def test_malformed_request_keeps_its_token(tmp_path, parser):
    """A token is not logged either when the request around it is malformed."""
    malformed = [
        *(data for _, data in NOT_HTTP.values() if SECRET.encode() in data),
        head(f'GET /plants?access_token={SECRET}\xff HTTP/1.1'),
        head(f'GET http://[?access_token={SECRET} HTTP/1.1'),
    ]
    with Server(tmp_path, '--http-parser', parser) as server:
        for data in malformed:
            with server.connect() as client:
                client.send(data)
                client.finish_sending()
                client.receive()
        shown = [line for line in server.log.splitlines() if SECRET in line]
    assert not shown


def test_token_is_not_logged(server, client):
    """The log has the name of a token, its path and status, and never the token."""
    for authorization in (f'Bearer {TOKEN}', f'Bearer {SECRET}', SECRET):
        target = f'/plants?access_token={SECRET}'
        client.ask(request('POST', target, fern(), authorization=authorization))
    assert 'token-1 POST /plants 200' in server.log
    assert TOKEN not in server.log
    assert SECRET not in server.log


# ---- slow clients


def assert_quick(server, rounds=10, between=lambda: None):
    """A healthy client is answered quickly, whatever the others do."""
    for _ in range(rounds):
        between()
        began = time.monotonic()
        with server.connect() as client:
            assert client.ask(request(body=fern())).status == 200
        assert time.monotonic() - began < QUICK


def test_slow_clients(server):
    """Clients that drip heads and bodies do not keep others waiting."""
    with ExitStack() as connections:
        clients = [connections.enter_context(server.connect()) for _ in range(80)]
        for client in clients[:40]:
            client.send(b'POST /plants HTTP/1.1\r\nX-Slow: ')
        for client in clients[40:]:
            client.send(request(body=b' ', content_length='1000'))

        def drip():
            for client in clients:
                client.send(b' ')

        assert_quick(server, between=drip)


LINGERING = {
    'connection: close': request(body=TAKEN, connection='close'),
    'not HTTP': b'\r\n\r\n\r\n',
    'refused body': request(body=b'a' * 70_000, authorization=None),
}


@pytest.mark.parametrize('data', LINGERING.values(), ids=LINGERING)
def test_clients_that_do_not_close(server, data):
    """Clients that keep their end open after an announced close hold up nobody."""
    with ExitStack() as connections:
        for _ in range(4):
            client = connections.enter_context(server.connect())
            assert client.ask(data).announces_close
        assert_quick(server, rounds=1)


@pytest.fixture(scope='module')
def impatient(tmp_path_factory):
    """The service with a short limit for each request."""
    directory = tmp_path_factory.mktemp('impatient')
    config = directory / 'impatient.conf.py'
    config.write_text(
        f'from pathlib import Path\n'
        f'__file__ = {str(REPOSITORY / "gunicorn.conf.py")!r}\n'
        f'exec(Path(__file__).read_bytes())\n'
        f'from serving import worker\n'
        f'worker.REQUEST_TIMEOUT = 0.5\n'
    )
    with Server(directory, '-c', str(config)) as server:
        yield server


DRIPPING = {
    'head': (b'POST /plants HTTP/1.1\r\nX-Slow: ', None),
    'body': (request(body=b' ', content_length='1000'), 40000),
    'chunks': (chunked(b' ', end=b'ff\r\n'), 40000),
}


@table('data, value', DRIPPING)
def test_dripping_request_is_ended(impatient, data, value):
    """A request that is not complete in time ends with its connection."""
    with impatient.connect() as client:
        client.send(data)

        def ended():
            client.send(b' ')
            return client.is_readable(0.02)

        wait_until(ended, 'it is ended', 5)
        answer = client.receive()
        if value is None:
            assert answer is None
        else:
            assert_error(answer, value)
            assert answer.announces_close
            assert client.receive() is None


# ---- signals


@pytest.fixture
def busy(tmp_path):
    """A server with connections that are kept, half sent and silent."""
    with Server(tmp_path, workers=2) as server, ExitStack() as connections:
        clients = [connections.enter_context(server.connect()) for _ in range(8)]
        for client in clients[:2]:
            assert client.ask(request(body=TAKEN)).status == 200
        for client in clients[2:4]:
            client.send(b'POST /plants HTTP/1.1\r\nHost: lo')
        for client in clients[4:6]:
            client.send(request(body=b'{"id"', content_length='100'))
        yield server


def assert_clean_end(server, seconds):
    """The server and its workers end in time, and report nothing unusual."""
    workers = server.worker_pids()
    assert server.wait(seconds) == 0
    assert not [pid for pid in workers if is_alive(pid)]
    assert 'Traceback' not in server.log
    assert 'ERROR' not in server.log


def test_interrupt(busy):
    """Ctrl-C ends the server at once, whatever its connections are doing."""
    busy.interrupt()
    assert_clean_end(busy, seconds=3)


def test_interrupt_of_the_master(busy):
    """SIGINT to the master alone does the same."""
    busy.signal(signal.SIGINT)
    assert_clean_end(busy, seconds=3)


def test_interrupt_again_and_again(busy):
    """Who presses Ctrl-C again and again does not stop the server from ending."""
    for _ in range(2_000):
        busy.interrupt()
    assert_clean_end(busy, seconds=3)


def test_interrupt_under_load(tmp_path):
    """Ctrl-C ends the server at once also while requests pour in."""
    done = threading.Event()

    def pour():
        with suppress(OSError):  # cut off and then refused, as it ends
            while not done.is_set():
                with server.connect(timeout=5) as client:
                    for _ in range(10):
                        client.ask(request('GET', '/livez'))

    with Server(tmp_path, workers=2) as server, ThreadPoolExecutor(8) as pool:
        try:
            loads = [pool.submit(pour) for _ in range(8)]
            wait_until(lambda: server.log.count('/livez 200') > 200, 'there is load')
            server.interrupt()
            assert_clean_end(server, seconds=3)
        finally:
            done.set()
        for load in loads:
            load.result()


def test_terminate(tmp_path):
    """SIGTERM lets a request that has begun be answered, and then ends the server."""
    plant = fern()
    data = request(body=plant)
    with Server(tmp_path, workers=2) as server, server.connect() as client:
        client.send(data[:-5])
        # NOTE: a worker takes connections in their order, so that one is taken now.
        assert server.ask(request('GET', '/livez')).status == 200
        server.signal(signal.SIGTERM)
        wait_until(lambda: 'Handling signal: term' in server.log, 'SIGTERM is seen')
        answer = client.ask(data[-5:])
        assert answer.status == 200
        assert_clean_end(server, seconds=5)
        assert plant in server.plants()


def test_killed_worker(tmp_path):
    """After kill -9 of the only worker another one takes over, with every plant."""
    plant = fern()
    with Server(tmp_path) as server:
        assert server.ask(request(body=plant)).status == 200
        [pid] = server.worker_pids()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), 'it is dead')
        assert server.ask(request(body=plant)).status == 200
        assert_error(server.ask(request(body=plant | {'name': 'Moss'})), 40006)
        assert server.plants() == [plant]
        assert len(server.worker_pids()) == 1


# ---- start


COMMANDS = {
    'gunicorn': [SCRIPTS / 'gunicorn'],
    'gunicorn app:app': [SCRIPTS / 'gunicorn', 'app:app'],
    'waitress-serve app:app': [
        *(SCRIPTS / 'waitress-serve', '--listen=127.0.0.1:0', 'app:app'),
    ],
    'python app.py': [sys.executable, 'app.py'],
}


@pytest.mark.parametrize('command', COMMANDS.values(), ids=COMMANDS)
def test_command_serves(checkout, command):
    """Every command that people type in a checkout serves."""
    plant = fern()
    with Server(checkout, command=command, workers=None) as server:
        assert server.ask(request(body=plant)).status == 200
        assert server.plants() == [plant]


def test_check_config(checkout):
    """The configuration passes gunicorn's own check, which makes no file."""
    server = Server(checkout, '--check-config', command=[SCRIPTS / 'gunicorn'])
    before = set(checkout.iterdir())
    assert server.run() == 0
    assert set(checkout.iterdir()) - before == {checkout / 'server.log'}


@pytest.fixture
def copy(checkout):
    """A checkout whose files can be edited."""
    for link in list(checkout.iterdir()):
        original = link.resolve()
        link.unlink()
        if original.is_dir():
            shutil.copytree(original, link, ignore=shutil.ignore_patterns('*.pyc'))
        else:
            shutil.copy(original, link)
    return checkout


def edit(path, old, new):
    """Put a text in the place of another in a file."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_reload_takes_up_files(copy):
    """New workers run the code, the schemas and the configuration as they are now."""
    with Server(copy, command=[SCRIPTS / 'gunicorn']) as server:
        old = server.worker_pids()
        edit(copy / 'app.py', "{'status': 'live'}", "{'status': 'still alive'}")
        edit(copy / 'schemas' / 'Plant.json', '"examples": ["Fern"]', '"maxLength": 4')
        edit(copy / 'gunicorn.conf.py', 'keepalive = 15', 'keepalive = 0')
        server.signal(signal.SIGHUP)
        wait_until(lambda: not old & server.worker_pids(), 'the worker is replaced')
        answer = server.ask(request('GET', '/livez'))
        assert answer.json == {'status': 'still alive'}
        assert answer.announces_close
        assert_error(server.ask(request(body=fern() | {'name': 'Ferns'})), 40005)


def test_reload_with_files_that_old_code_refuses(copy):
    """New code alone says whether new files will do."""
    with Server(copy, command=[SCRIPTS / 'gunicorn']) as server:
        old = server.worker_pids()
        edit(copy / 'schemas' / '__init__.py', "glob('*.json')", "glob('[NPE]*.json')")
        (copy / 'schemas' / 'other.json').write_text('true')
        server.signal(signal.SIGHUP)
        wait_until(lambda: not old & server.worker_pids(), 'the worker is replaced')
        assert server.ask(request(body=fern())).status == 200


BROKEN = {
    'code': ('app.py', 'class LiveResource:', 'class LiveResource(:', 'SyntaxError'),
    'schema': ('schemas/Plant.json', '"type": "object"', '"type": 1', 'Plant.json'),
    'configuration': ('gunicorn.conf.py', 'keepalive = 15', 'keepalive =', 'keepalive'),
}


@table('file, old, new, word', BROKEN)
def test_reload_that_would_fail(copy, file, old, new, word):
    """What new workers could not start with changes nothing."""
    with Server(copy, command=[SCRIPTS / 'gunicorn']) as server:
        workers = server.worker_pids()
        edit(copy / file, old, new)
        server.signal(signal.SIGHUP)
        wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
        assert word in server.log
        assert server.ask(request(body=fern())).status == 200
        assert server.worker_pids() == workers
        edit(copy / file, new, old)
        server.signal(signal.SIGHUP)
        wait_until(lambda: not workers & server.worker_pids(), 'it is reloaded')
        assert server.ask(request(body=fern())).status == 200


def test_second_server_is_refused(server, tmp_path):
    """A second server on the same port does not start, and the first goes on."""
    second = Server(tmp_path, '--bind', f'127.0.0.1:{server.port}')
    assert second.run() == 1
    assert 'Address already in use' in second.log
    assert 'Booting worker' not in second.log
    assert_quick(server, rounds=3)


def test_printed_curl_line_works(tmp_path):
    """With no token configured one is made, and the line that is printed can be run."""
    with Server(tmp_path, workers=2, PLANTS_TOKENS=None) as server:
        [line] = re.findall('^ *(curl .+)$', server.log, re.MULTILINE)
        for _ in range(4):
            command = ['bash', '-c', line]
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE)
            assert (done.returncode, done.stdout) == (0, b'{"name": "Fern"}')
        assert server.plants() == [{'id': 1, 'name': 'Fern'}]
        assert_error(server.ask(request(body=fern(), authorization=None)), 40100)
        assert_error(server.ask(request(body=fern())), 40101)


def test_made_token_survives_a_reload(tmp_path):
    """The token that was made is printed once and still good after SIGHUP."""
    with Server(tmp_path, PLANTS_TOKENS=None) as server:
        [header] = re.findall("'(Authorization: .+?)'", server.log)
        token = header.rpartition(' ')[2]
        old = server.worker_pids()
        server.signal(signal.SIGHUP)
        wait_until(lambda: not old & server.worker_pids(), 'the worker is replaced')
        data = request(body=fern(), authorization=f'Bearer {token}')
        assert server.ask(data).status == 200
        assert server.log.count('No token is configured') == 1


BAD_STARTS = {
    'memory: and two workers': (
        {'PLANTS_STORE': 'memory:', 'WEB_CONCURRENCY': '2'},
        ['PLANTS_STORE', 'memory:', 'one worker', '2'],
    ),
    'store of no kind': ({'PLANTS_STORE': 'redis:x'}, ['PLANTS_STORE', 'redis:x']),
    'store in no directory': ({'PLANTS_STORE': 'jsonl:no/plants'}, ['no/plants']),
    'limit of zero': ({'PLANTS_MAX_BODY': '0'}, ['PLANTS_MAX_BODY', "'0'"]),
    'limit of words': ({'PLANTS_MAX_BODY': '64k'}, ['PLANTS_MAX_BODY', "'64k'"]),
    'empty tokens': ({'PLANTS_TOKENS': ''}, ['PLANTS_TOKENS', 'no token']),
    'token of symbols': ({'PLANTS_TOKENS': f'{SECRET}!'}, ['PLANTS_TOKENS', '1']),
    'token of three words': (
        {'PLANTS_TOKENS': f'good,{SECRET} {SECRET} {SECRET}'},
        ['PLANTS_TOKENS', '2'],
    ),
    'digest cut off': ({'PLANTS_TOKENS': 'sha256:abc'}, ['PLANTS_TOKENS', 'sha256']),
    'no tokens file': (
        {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': 'absent'},
        ['PLANTS_TOKENS_FILE', 'absent'],
    ),
    'tokens twice': (
        {'PLANTS_TOKENS_FILE': 'absent'},
        ['PLANTS_TOKENS ', 'PLANTS_TOKENS_FILE'],
    ),
    'statsd': (
        {'GUNICORN_CMD_ARGS': '--bind 127.0.0.1:0 --statsd-host localhost:8125'},
        ['statsd_host', 'logger-class'],
    ),
}


def assert_start_refused(server, *words):
    """It ends with a sentence that has these words, and with nothing else."""
    assert server.run() == 1
    [sentence] = [line for line in server.log.splitlines() if '[INFO]' not in line]
    for word in words:
        assert word in sentence
    assert SECRET not in sentence


@table('environment, words', BAD_STARTS)
def test_bad_start(tmp_path, environment, words):
    """A bad setting stops the start with a sentence that names it."""
    assert_start_refused(Server(tmp_path, '-p', 'pid', **environment), *words)
    assert [path.name for path in tmp_path.iterdir()] == ['server.log']


def test_damaged_file_stops_the_start(tmp_path):
    """A damaged line with sound ones behind it stops the start and stays as it is."""
    damaged = b'{"id":1,"name":"Fern"}\n{"id":2,"na\n{"id":3,"name":"Moss"}\n'
    (tmp_path / 'plants.jsonl').write_bytes(damaged)
    assert_start_refused(Server(tmp_path, workers=2), 'plants.jsonl', 'line 2', 'check')
    assert (tmp_path / 'plants.jsonl').read_bytes() == damaged


@table(
    'schema, words',
    {
        'no object': ('true', ['Plant.json', 'true is not an object']),
        'reference to no file': (
            '{"properties": {"tag": {"$ref": "Tag.json"}}}',
            ['Plant.json', '"Tag.json" leads nowhere'],
        ),
    },
)
def test_broken_schema_stops_the_start(copy, schema, words):
    """A schema that cannot be used stops the start with a sentence that names it."""
    (copy / 'schemas' / 'Plant.json').write_text(schema)
    server = Server(copy, command=[SCRIPTS / 'gunicorn'])
    assert_start_refused(server, *words)
    assert not (copy / 'plants.jsonl').exists()


def test_memory_store_has_one_worker(tmp_path):
    """Plants in memory are served by one worker, however many cores there are."""
    plant = fern()
    with Server(tmp_path, workers=None, PLANTS_STORE='memory:') as server:
        assert len(server.worker_pids()) == 1
        assert server.ask(request(body=plant)).status == 200
        assert_error(server.ask(request(body=plant | {'name': 'Moss'})), 40006)


def test_broken_tokens_file_at_a_reload(tmp_path):
    """A broken tokens file refuses a reload; a new worker accepts the old tokens."""
    tokens = tmp_path / 'tokens'
    tokens.write_text(f'garden {TOKEN}\n')
    settings = {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': str(tokens)}
    with Server(tmp_path, **settings) as server:
        [before] = server.worker_pids()
        tokens.write_text('more than two words\n')
        server.signal(signal.SIGHUP)
        refusal = 'line 1: it is not TOKEN or NAME TOKEN'
        wait_until(lambda: 'Not reloaded' in server.log, 'it is refused')
        assert refusal in server.log
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not is_alive(before), 'the old worker ends')
        wait_until(lambda: server.worker_pids(), 'a new worker starts')
        assert server.ask(request(body=fern())).status == 200


def test_memory_store_keeps_one_worker(tmp_path):
    """A worker asked for by SIGTTIN would have its own plants: there is none."""
    with Server(tmp_path, workers=None, PLANTS_STORE='memory:') as server:
        before = server.worker_pids()
        server.signal(signal.SIGTTIN)
        refusal = 'memory: needs one worker, not 2'
        wait_until(lambda: refusal in server.log, refusal)
        assert server.ask(request(body=fern())).status == 200
        assert server.worker_pids() == before


# ---- spreading


@pytest.mark.parametrize('at_once', [False, True], ids=['one by one', 'at once'])
def test_connections_are_spread(server, at_once):
    """Kept connections are spread evenly over the workers."""

    def is_even():
        held = connections_of_workers(server, at_once)
        return len(held) == 2 and min(held.values()) >= 6

    # Not always: a worker that the machine holds up for some milliseconds gets fewer.
    assert sum(is_even() for _ in range(10)) >= 8


def connections_of_workers(server, at_once):
    """Connect 16 clients; return how many of them each worker has."""
    held = Counter()
    with ExitStack() as connections:
        clients = []
        for _ in range(16):
            client = connections.enter_context(server.connect())
            clients.append(client)
            if not at_once:
                client.ask(request('GET', '/livez'))
        for client in clients:
            client.send(request('GET', '/livez'))
        for client in clients:
            held[server.worker_of(client.receive())] += 1
    return held
