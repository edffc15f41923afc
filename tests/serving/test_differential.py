"""Second opinions, of h11 and of llhttp: which requests are in a stream of bytes.

The grammar is stricter than both: it may refuse what they read. It must take no bytes
for another request than they do, and must refuse nothing that clients send.
"""

import itertools
from contextlib import suppress

import h11
import httptools
from exchange import chunked, raw_head
from server import request
from test_requests import BAD_LINES, BAD_METHODS, BAD_PROTOCOLS, BAD_TARGETS, TARGETS

from serving.request import read_head

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
EDITS = [b'\r\n', *(bytes([code]) for code in b' \t\n\r\0:_0,\x80A')]

# For a request with the body "xyz", or with it as a chunk, alone and in pairs.
LINES = [
    *BAD_LINES,
    *('Content-Length: 3', 'Content-Length: 03', 'Content-Length: 4'),
    *('Transfer-Encoding: chunked', 'Transfer-Encoding: Chunked', 'Content_Length: 4'),
    *('Connection: close', 'Connection: Upgrade', 'Upgrade: websocket'),
    *('Transfer_Encoding: chunked', 'Expect: 200-ok'),
]
BODIES = [b'xyz', b'3\r\nxyz\r\n0\r\n\r\n']
BEGINS = [
    *(f'POST / {protocol}' for protocol in ['HTTP/1.1', 'HTTP/1.0', *BAD_PROTOCOLS]),
    *(f'POST {target} HTTP/1.1' for target in ['//a', '/%zz', *TARGETS, *BAD_TARGETS]),
    *(f'{method} / HTTP/1.1' for method in BAD_METHODS),
    *('CONNECT a:80 HTTP/1.1', 'PRI * HTTP/2.0', 'POST'),
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
        yield raw_head(begin, 'Host: a', 'Content-Length: 3') + body
        yield raw_head(begin, 'Host: a', 'Transfer-Encoding: chunked') + body
    for number, body in itertools.product((1, 2), BODIES):
        for lines in itertools.permutations(LINES, number):
            yield raw_head('POST / HTTP/1.1', 'Host: a', *lines) + body
            yield raw_head('POST / HTTP/1.0', *lines) + body


def read_by_us(*pieces):
    """Return the requests in a stream, and the status that refuses what follows."""
    received, found, current = bytearray(), [], None
    for piece in pieces:
        received += piece
        while True:
            current = current or read_head(received, {'SCRIPT_NAME': ''})
            whole = current and current.take(received, 65_536)
            if not whole:
                break
            if whole.refusal:
                return found, whole.refusal
            found.append(as_tuple(whole.environ, whole.body))
            if not whole.keeps:
                return found, None
            current = None
    return found, None


def as_tuple(environ, body):
    """Return method, target, the fields by name, and the body of a request."""
    fields = {
        name.removeprefix('HTTP_').replace('_', '-').lower(): text
        for name, text in environ.items()
        if name.startswith(('HTTP_', 'CONTENT_TYPE'))
    }
    return environ['REQUEST_METHOD'], environ['RAW_URI'], fields, bytes(body)


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
    """What llhttp calls, and so the requests that it finds."""

    def __init__(self, data):
        self.found, self.is_upgrade = [], False
        self.parser = httptools.HttpRequestParser(self)
        with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.parser.feed_data(data)

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
        target, fields = self.target.decode('latin-1'), combined(self.fields)
        self.found.append((self.method, target, fields, self.body))


FOLLOWING = request('GET', '/next', host='next')


def test_no_bytes_are_taken_for_another_request():
    """What is read is what h11 and llhttp read there, too; what is sound is read."""
    assert [name for name in SOUND if len(read_by_us(SOUND[name])[0]) != 1] == []
    wrong, agreed, refused = [], 0, 0
    for data in [*SOUND.values(), *hostile()]:
        data += FOLLOWING
        ours, fault = read_by_us(data)
        theirs, llhttp = read_by_h11(data), Reader(data)
        if ours != theirs[: len(ours)]:
            wrong.append((data, ours, theirs))
        # llhttp knows few methods, and says nothing of a request that never ends.
        if not llhttp.is_upgrade and any(map(tuple.__ne__, ours, llhttp.found)):
            wrong.append((data, ours, llhttp.found))
        agreed, refused = agreed + (ours == theirs), refused + bool(fault)
    assert not wrong, f'{len(wrong)}, the first: {wrong[0]}'
    assert agreed > 15_000
    assert refused > 10_000


def test_bytes_are_read_alike_however_they_are_split():
    """A split at any byte, and a byte at a time, change nothing that is read."""
    streams = [*itertools.islice(hostile(), 0, None, 397), *SOUND.values()]
    for stream in streams:
        data = stream + FOLLOWING
        whole = read_by_us(data)
        for at in range(1, len(data)):
            assert read_by_us(data[:at], data[at:]) == whole
        single = [data[at : at + 1] for at in range(len(data))]
        assert read_by_us(*single) == whole
