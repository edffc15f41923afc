"""Second opinions, of h11 and of llhttp: which requests are in a stream of bytes.

The grammar is stricter than both: it may refuse what they read. It must take no bytes
for another request than they do, and must refuse nothing that clients send.
"""

import itertools

import h11
import httptools
import pytest
from exchange import chunked
from server import request

from serving.request import Request, read_head

LIMIT = 65_536
COMMON = {'SCRIPT_NAME': ''}

SOUND = {
    'get': request('GET', '/livez?a=b', user_agent='curl/8.5.0', accept='*/*'),
    'post': request(body={'id': 1}, content_type='application/json; charset=utf-8'),
    'head': request('HEAD', '/docs', connection='close'),
    'options': request('OPTIONS', '*', origin='https://page.example'),
    'absolute target': request('GET', 'http://a.example:80/livez?a'),
    'address': request('GET', '/', host='[::1]:8000'),
    'old version': request('GET', '/', version='1.0', host=None),
    'old version, kept': request('GET', '/', version='1.0', connection='Keep-Alive'),
    'chunks': chunked(b'{"id": 1, ', b'"name": "Fern"}'),
    'chunks with more': chunked(end=b'1;a="b;c"\r\n \r\n00;c\r\nX: y\r\n\r\n'),
    'empty chunks': chunked(),
    'field values': request('GET', a='', b='\t x\ty ', c='\xe4\xff', d=['1', '2']),
    'java': request(body=b'{}', connection='Upgrade', upgrade='h2c', http2_settings=''),
    'expectation': request(body=b'{}', expect='100-Continue'),
}

# In a stream of each of these, every byte is left out, and has each of these put before
# it and in its place.
EDITED = [
    *(SOUND['post'], SOUND['chunks with more'], SOUND['absolute target']),
    request('GET', '/', connection='keep-alive, x', host='a', content_length='0'),
]
EDITS = [
    b' ',
    b'\t',
    b'\n',
    b'\r\n',
    b'\r',
    b'\0',
    b':',
    b'_',
    b'0',
    b',',
    b'\x80',
    b'A',
]

# Lines for a request with the body "xyz", or with it as a chunk, alone and in pairs.
LINES = [
    *(
        'Host: b',
        'Host:',
        'Content-Length: 3',
        'Content-Length: 03',
        'Content-Length: 4',
    ),
    *('Content-Length: 3, 3', 'Content-Length: +3', 'Content-Length: 0x3', 'X : a'),
    *(
        'Content-Length: ',
        'Content-Length: 3 3',
        'Content_Length: 4',
        ' X: a',
        'X',
        ':',
    ),
    *('Content-Length: 99999999999999999999', 'Transfer-Encoding: chunked', 'X: a\0b'),
    *('Transfer-Encoding: Chunked', 'Transfer-Encoding: gzip, chunked', 'X: a\rb'),
    *('Transfer-Encoding: chunked, identity', 'Transfer-Encoding:\vchunked', 'X: a\nb'),
    *('Transfer-Encoding: "chunked"', 'Transfer_Encoding: chunked', 'X: a\r\n b'),
    *('Transfer-Encoding:', 'Transfer-Encoding : chunked', 'Connection: close'),
    *('Connection: Upgrade', 'Upgrade: websocket', 'Expect: 200-ok', 'X\xe4: a'),
]
BODIES = [b'xyz', b'3\r\nxyz\r\n0\r\n\r\n']
BEGINS = [
    *('GET / HTTP/1.1', 'POST / HTTP/1.1', 'POST / HTTP/1.0', 'POST / HTTP/1.2'),
    *('POST / HTTP/2.0', 'POST / http/1.1', 'POST  / HTTP/1.1', 'POST /  HTTP/1.1'),
    *('POST /', 'POST / HTTP/1.1 ', ' POST / HTTP/1.1', 'post / HTTP/1.1', 'POST / '),
    *('CONNECT a:80 HTTP/1.1', 'CONNECT / HTTP/1.1', 'POST * HTTP/1.1', 'POST'),
    *(
        'POST a HTTP/1.1',
        'POST //a HTTP/1.1',
        'POST http://b HTTP/1.1',
        'P\0ST / HTTP/1.1',
    ),
    *('POST http:// HTTP/1.1', 'POST http://a@b/ HTTP/1.1', 'POST /\xff HTTP/1.1'),
    *(
        'POST /#a HTTP/1.1',
        'POST /%zz HTTP/1.1',
        'POST /a\tb HTTP/1.1',
        'PRI * HTTP/2.0',
    ),
    *('POST / RTSP/1.0', 'POST / HTTP/1.10', 'POST / HTTP/01.1', 'POST / HTTP/1.1\r'),
]


def hostile():
    """Return streams of bytes, most of which are refused."""
    for data in EDITED:
        for at, edit in itertools.product(range(len(data)), EDITS):
            yield data[:at] + edit + data[at:]
            yield data[:at] + edit + data[at + 1 :]
        for at in range(len(data)):
            yield data[:at] + data[at + 1 :]
    for begin, body in itertools.product(BEGINS, BODIES):
        yield raw(begin, 'Host: a', 'Content-Length: 3') + body
        yield raw(begin, 'Host: a', 'Transfer-Encoding: chunked') + body
    for number, body in itertools.product((1, 2), BODIES):
        for lines in itertools.permutations(LINES, number):
            yield raw('POST / HTTP/1.1', 'Host: a', *lines) + body
            yield raw('POST / HTTP/1.0', *lines) + body


def raw(*lines):
    """Return the bytes of a head with these lines."""
    return '\r\n'.join([*lines, '', '']).encode('latin-1')


def read_by_us(data, *, pieces=None):
    """Return the requests in a stream, and the status that refuses what follows."""
    received, found, current, seen = bytearray(), [], None, 0
    for piece in pieces or [data]:
        received += piece
        while True:
            if current is None:
                current = read_head(received, seen, COMMON, LIMIT)
                seen = len(received)
            if current is None or not current.take(received):
                break
            if current.fault:
                return found, current.fault
            found.append(as_tuple(current))
            if not current.keeps:
                return found, None
            current, seen = None, 0
    return found, None


def as_tuple(read: Request):
    """Return method, target, the fields by name, and the body of a request."""
    environ = read.environ
    fields = {
        name.removeprefix('HTTP_').replace('_', '-').lower(): text
        for name, text in environ.items()
        if name.startswith(('HTTP_', 'CONTENT_'))
    }
    fields.pop('content-length', None)  # chunks get one, too
    return environ['REQUEST_METHOD'], environ['RAW_URI'], fields, bytes(read.body)


def combined(fields):
    """Return fields by name, as WSGI has them."""
    result = {}
    for name, text in fields:
        name, text = name.decode('latin-1').lower(), text.decode('latin-1').strip(' \t')
        if '_' not in name and name not in ('content-length', 'transfer-encoding'):
            result[name] = f'{result[name]},{text}' if name in result else text
    return result


def read_by_h11(data):
    """Return the requests that h11 finds, which ends at the first that it refuses."""
    found = []
    while data:
        connection = h11.Connection(h11.SERVER)
        # RFC 9112, section 2.2: an empty line before a request is ignored.
        connection.receive_data(data.removeprefix(b'\r\n'))
        connection.receive_data(b'')
        try:
            head, body = connection.next_event(), b''
            if isinstance(head, h11.ConnectionClosed):
                break
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            break
        begin = head.method.decode(), head.target.decode()
        found.append((*begin, combined(head.headers), bytes(body)))
        data = connection.trailing_data[0]
    return found


class Reader:
    """What llhttp calls."""

    def __init__(self):
        self.found, self.is_upgrade = [], False
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self):
        self.target, self.fields, self.body, self.is_in_head = b'', [], b'', True

    def on_url(self, url):
        self.target += url

    def on_header(self, name, value):
        if self.is_in_head:  # or it is a trailer
            self.fields.append((name, value))

    def on_headers_complete(self):
        self.is_in_head = False
        self.method = self.parser.get_method().decode()
        self.is_upgrade |= self.parser.should_upgrade() or self.method == 'CONNECT'

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        target = self.target.decode('latin-1')
        fields = combined(self.fields)
        self.found.append((self.method, target, fields, self.body))


def read_by_llhttp(data):
    """Return the requests that llhttp finds, or None for an upgrade."""
    reader = Reader()
    try:
        reader.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return None
    except httptools.HttpParserError:
        pass
    return None if reader.is_upgrade else reader.found


FOLLOWING = request('GET', '/next', host='next')


def test_no_bytes_are_taken_for_another_request():
    """Each request that is read is the one that h11 and llhttp read there, too."""
    wrong, agreed, refused = [], 0, 0
    for data in hostile():
        data += FOLLOWING
        ours, fault = read_by_us(data)
        theirs, llhttps = read_by_h11(data), read_by_llhttp(data) or []
        if ours != theirs[: len(ours)]:
            wrong.append((data, ours, theirs))
        # It knows few methods, and says nothing of a request that never ends.
        if any(map(tuple.__ne__, ours, llhttps)):
            wrong.append((data, ours, llhttps))
        agreed, refused = agreed + (ours == theirs), refused + bool(fault)
    assert not wrong, f'{len(wrong)}, the first: {wrong[0]}'
    assert agreed > 15_000
    assert refused > 10_000


@pytest.mark.parametrize('data', SOUND.values(), ids=SOUND)
def test_sound_request_is_read_as_others_read_it(data):
    """What clients send is read, and what follows it is read as the next request."""
    (ours, fault), h11s = read_by_us(data + FOLLOWING), read_by_h11(data + FOLLOWING)
    assert fault is None
    assert ours == h11s[: len(ours)]
    is_last = b'close' in data or (b'HTTP/1.0' in data and b'Keep' not in data)
    assert len(ours) == 2 - is_last


def test_bytes_are_read_alike_however_they_are_split():
    """A split at any byte, and a byte at a time, change nothing that is read."""
    streams = [*itertools.islice(hostile(), 0, None, 97), *SOUND.values()]
    for stream in streams:
        data = stream + FOLLOWING
        whole = read_by_us(data)
        for at in range(1, len(data)):
            assert read_by_us(data, pieces=[data[:at], data[at:]]) == whole
        single = [data[at : at + 1] for at in range(len(data))]
        assert read_by_us(data, pieces=single) == whole
