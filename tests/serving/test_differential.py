"""h11 as the second opinion: which requests are in a stream of bytes.

The server reads the requests that h11 reads. It refuses what h11 refuses, and what
``STRICTER`` names, with the section of the RFC.
"""

import re

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server import Server

ECHO = """
import json

def app(environ, start_response):
    body, status = b'', '200 OK'
    try:
        body = environ['wsgi.input'].read()
        if len(body) != int(environ.get('CONTENT_LENGTH') or len(body)):
            raise EOFError
    except Exception:
        environ['wsgi.input'].read()  # what follows is no request all the same
        status = '400 Bad Request'
    headers = {
        name.removeprefix('HTTP_').replace('_', '-').lower(): text
        for name, text in environ.items()
        if name.startswith(('HTTP_', 'CONTENT_'))
    }
    begin = environ['REQUEST_METHOD'], environ['RAW_URI']
    answer = json.dumps([*begin, headers, body.decode('latin-1')]).encode()
    fields = {'Content-Type': 'application/json', 'Content-Length': str(len(answer))}
    start_response(status, list(fields.items()))
    return [answer]
"""

_HOST = rb"(?:[\w.~!$&'()*+,;=-]|%[\da-f]{2})*|\[::1?\]"
_PATH = rb"(?:[\w.~!$&'()*+,;=:@/-]|%[\da-f]{2})*"
_EXTENSION = rb'[ \t]*;[ \t]*[\w-]+([ \t]*=[ \t]*([\w-]+|"[^"\\\r\n]*"))?'
_QUERY = rb'(?:\?[^\x00- "#<>\x7f-\xff]*)?'  # of browsers
_PATH_AND_QUERY = _PATH + _QUERY
# What is in a head, or in chunks, that h11 accepts and the server refuses.
STRICTER = {
    'RFC 9110, section 5.3': rb'\nContent-Type:(.*\n)*Content-Type:',
    'RFC 9110, section 5.5': rb'[\x01-\x08\v\f\x0e-\x1f\x7f]',
    'RFC 9110, section 9.1': rb'\A(?!(?-i:[-!$-.0-9A-Z^_`|~]){3,20} )',
    'RFC 9110, section 10.1.1': rb'\nExpect:(?![ \t]*100-continue[ \t]*\r)',
    'RFC 9112, section 2.2': rb'(?<!\r)\n',
    'RFC 9112, section 2.3': rb'\A\S+ \S+ HTTP/(?!1\.[01]\r)',
    'RFC 9112, section 3.2': rb'\nHost:(?![ \t]*(%b)(:\d*)?[ \t]*\r)' % _HOST,
    'RFC 9112, section 3.2.1': rb'\A(?!CONNECT )\S+ /(?!(?<=/)%b )' % _PATH_AND_QUERY,
    'RFC 9112, section 3.2.2': rb'\A(?!CONNECT )\S+ (?!https?://(?=[^:/?])(%b)(:\d*)?'
    rb'(?=[/? ])%b )[^/*]' % (_HOST, _PATH_AND_QUERY),
    'RFC 9112, section 3.2.3': rb'\ACONNECT (?!(?=[^:])(%b):\d+ )' % _HOST,
    'RFC 9112, section 3.2.4': rb'\A(?!OPTIONS )\S+ \*',
    'RFC 9112, section 5.2': rb'\r\n[ \t]',
    'RFC 9112, section 6.1': rb'\A.* HTTP/1\.0\r(.*\n)*Transfer-Encoding:',
    'RFC 9112, section 6.3': rb'\nTransfer-Encoding:(.*\n)*Content-Length:'
    rb'|\nContent-Length:((.*\n)*(Transfer-Encoding|Content-Length):|[^\r]*,)',
}
STRICTER_CHUNKS = {
    'RFC 9110, section 6.5.1': rb'\n(Host|TE|Trailer|Content-Length|Authorization):',
    'RFC 9112, section 2.2': rb'[^\rxyz]\n',  # not in data
    'RFC 9112, section 7.1.1': rb'(\A|\n)[\da-f]+(?![\da-f]|(%b)*\r)' % _EXTENSION,
}


def is_stricter(rules, raw):
    """Whether the server is stricter than h11 with a head or with chunks."""
    return any(re.search(form, raw, re.IGNORECASE) for form in rules.values())


@pytest.fixture(scope='module')
def echo(tmp_path_factory):
    """A server whose application answers with the request as it was read."""
    directory = tmp_path_factory.mktemp('echo')
    (directory / 'echo.py').write_text(ECHO)
    with Server(directory, 'echo:app', '-w1', workers=None) as server:
        yield server


def often(*usual, seldom=()):
    """Choose: the usual values four times as often as all others together."""
    return st.sampled_from([*usual * max(1, 4 * len(seldom) // len(usual)), *seldom])


METHODS = often('GET', 'POST', seldom=['OPTIONS', 'CONNECT', 'BREW', 'get', 'A#', ''])
TARGETS = often(
    *('/', '/a?b=c'),
    seldom=[
        *('*', 'http://a/b', 'HTTPS://[::1]:80?c', 'a:80', '/a#b', '/%zz', '/"', 'x'),
        *('/a?b[]=%', '/a[?b'),
    ],
)
VERSIONS = often('1.1', seldom=['1.0', '1.2', '1.9', '2.0', '0.9', '1.10', '1'])
HOSTS = often('a', seldom=['', 'a:80', '[::1]', '[::1', 'a b', 'a/b', 'a%20', 'a, b'])
LINES = often(
    *('Accept: */*', 'X-Request-Id: one', 'X-Request-Id: two', 'Connection: x, Close'),
    *('Connection: keep-alive', 'Content-Type: a/b', 'Expect: 100-continue', 'X: é'),
    *('X_Request_Id: under', 'x-request-id:two words', 'X-REQUEST-ID: three\t'),
    seldom=[
        *('Host: b', 'Content-Length: 3', 'Content-Length: 3, 3', 'Content-Length: +3'),
        *('Transfer-Encoding: chunked', 'transfer-encoding: gzip', 'X : a', ' X: a'),
        *('Transfer-Encoding:\vchunked', 'Expect: b', 'X_Y: a', 'X', 'X: \0', 'X: \1'),
        *('X: \r', 'X-Request-Id: a\r\n b', 'X-Request-Id : a', 'Content-Type: c/d'),
        'Content-Length: ' + '9' * 5_000,
    ],
)
# Only the data has these letters: no line of it is like a size.
BAD_CHUNKS = ['1;=\r\nx\r\n', '+1\r\nx\r\n', '0x1\r\nx\r\n', '1\r\nxX']
CHUNKS = often('3\r\nxyz\r\n', seldom=['2;a="b";c\r\nxy\r\n', *BAD_CHUNKS])
ENDS = often('0\r\n\r\n', seldom=['0\r\nX: a\r\n\r\n', '0\r\nHost: a\r\n\r\n', '0\r\n'])
# Where a byte is changed, as a part of the stream, and what is there instead.
EDITS = st.tuples(st.floats(0, 1), st.sampled_from(['', ' ', '\n', '\r\n', '\0', ':']))


@st.composite
def streams(draw):
    """Make the bytes of two requests, and where to cut them in two."""
    stream = draw(often('', seldom=['\r\n', '\r\n\r\n']))
    for _ in range(2):
        lines = [f'Host: {draw(HOSTS)}'] * draw(often(1, seldom=[0]))
        lines += draw(st.lists(LINES, max_size=3))
        body = draw(st.sampled_from(['', 'abc', None]))
        if body is None:
            lines.append('Transfer-Encoding: chunked')
            body = ''.join(draw(st.lists(CHUNKS, max_size=2))) + draw(ENDS)
        elif body:
            lines.append(f'Content-Length: {draw(often(3, seldom=["03", 2, 4]))}')
        lines = draw(st.permutations(lines))
        begin = f'{draw(METHODS)} {draw(TARGETS)} HTTP/{draw(VERSIONS)}'
        stream += '\r\n'.join([begin, *lines, '', body])
    for where, instead in draw(st.lists(EDITS, max_size=1)):
        at = int(where * len(stream))
        stream = stream[:at] + instead + stream[at + draw(st.integers(0, 1)) :]
    return stream.encode('latin-1'), draw(st.integers(0, len(stream)))


def read_by_h11(data):
    """Return the first request, the bytes behind it, and whether it is the last."""
    connection = h11.Connection(h11.SERVER)
    # RFC 9112, section 2.2: an empty line before a request is ignored.
    connection.receive_data(data.removeprefix(b'\r\n'))
    connection.receive_data(b'')
    request = connection.next_event()
    if isinstance(request, h11.ConnectionClosed):
        raise h11.RemoteProtocolError('there is only an empty line')
    headers, body = {}, ''
    for name, text in request.headers:
        name, text = name.decode(), text.decode('latin-1')
        if '_' not in name:  # the server leaves these out
            headers[name] = f'{headers[name]},{text}' if name in headers else text
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data.decode('latin-1')
    read = [request.method.decode(), request.target.decode(), headers, body]
    is_last = connection.their_state is h11.MUST_CLOSE or request.method == b'CONNECT'
    options = headers.get('connection', '').lower()
    # RFC 9112, section 9.3: h11 does not keep connections of HTTP/1.0.
    if request.http_version == b'1.0' and 'close' not in options:
        is_last = 'keep-alive' not in options
    return read, connection.trailing_data[0], is_last


def receive(client):
    """Return the next answer that is not an interim one."""
    while (answer := client.receive()) and answer.status == 100:
        pass
    return answer


@given(streams())
@settings(max_examples=400)
def test_server_finds_the_requests_that_h11_finds(echo, stream):
    """Each request is read as h11 reads it, or refused as the table says, twice."""
    data, cut = stream
    check(echo, data, cut)
    check(echo, data, 0)  # the server has seen these heads before


def check(echo, data, cut):
    """Send bytes in two parts, and check each answer."""
    with echo.connect() as client:
        client.send(data[:cut])
        client.send(data[cut:])
        client.finish_sending()
        answer = None
        while data and not (answer and answer.announces_close):
            try:
                read, rest, is_last = read_by_h11(data)
            except h11.RemoteProtocolError:
                answer = receive(client)
                assert answer is None or answer.status in (400, 414, 417, 431)
                break
            if '\n' in read[3]:
                return  # it is like a bare line feed of a chunk
            answer = receive(client)
            raw = data[: len(data) - len(rest)].removeprefix(b'\r\n')
            head = re.match(rb'(?s:.*?)\n\r?\n', raw)[0]
            stricter = is_stricter(STRICTER, head)
            if not stricter and 'transfer-encoding' in read[2]:
                stricter = is_stricter(STRICTER_CHUNKS, raw[len(head) :])
            if stricter:
                assert answer.status in (400, 417)
                assert answer.announces_close
            else:
                assert answer.status == 200
                assert answer.json == read
                assert answer.announces_close == is_last
            data = rest
        assert client.receive() is None
