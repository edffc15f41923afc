"""A client that can send any bytes, and reads its answers strictly."""

import json
import re
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from waiting import PATIENCE

TOKEN = 'a-token-that-no-log-may-show'


def request(method='POST', target='/plants', body=b'', *, version='1.1', **headers):
    """Return a request with a token; a header may be a list, or None to omit it."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    defaults = {'host': 'localhost', 'authorization': f'Bearer {TOKEN}'}
    if body:
        defaults['content_type'] = 'application/json'
        if 'transfer_encoding' not in headers:
            defaults['content_length'] = str(len(body))
    lines = [f'{method} {target} HTTP/{version}']
    for name, value in (defaults | headers).items():
        for text in value if isinstance(value, list) else [value]:
            if text is not None:
                lines.append(f'{name.replace("_", "-")}: {text}')
    return '\r\n'.join([*lines, '', '']).encode('latin-1') + body


@dataclass(frozen=True)
class Answer:
    """An answer. Its header names are in lower case."""

    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        assert self.headers['content-type'] == 'application/json', self
        return json.loads(self.body)

    @property
    def announces_close(self):
        return self.headers.get('connection') == 'close'


class RawClient:
    def __init__(self, port=None, *, source=None, trust=None, over=None):
        if over is None:
            bound = source and (source, 0)
            over = socket.create_connection(('127.0.0.1', port), PATIENCE, bound)
        if trust:
            over = trust.wrap_socket(over, server_hostname='localhost')
            over.suppress_ragged_eofs = False  # the end of TLS comes first
        self._socket = over
        self._stream = self._socket.makefile('rb')

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def send(self, data):
        # A server may refuse a body and close while we still send it. Its answer can
        # be received all the same.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def receive(self, *, head=False):
        """Return the next answer, or ``None`` if the server closed the connection."""
        try:
            line = self._stream.readline()
            if not line:
                return None
            status = int(re.fullmatch(rb'HTTP/1\.[01] (\d{3}) [ -~]*\r\n', line)[1])
            headers = self._headers()
            has_body = not head and status not in (100, 204)
            length = int(headers['content-length']) if has_body else 0
            assert status != 204 or 'content-length' not in headers
            body = self._stream.read(length)
        except ConnectionResetError:
            return None
        if len(body) < length:
            raise ConnectionError(f'the body ends after {len(body)} of {length} bytes')
        return Answer(status, headers, body)

    def ask(self, data):
        """Send a request and return its answer."""
        self.send(data)
        return self.receive()

    def is_readable(self, seconds=0):
        """Whether an answer, or the end of the stream, can be received."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def finish_sending(self):
        """Send the end of the stream; answers can still be received."""
        with suppress(OSError):  # the server may have closed already
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self):
        """Close the connection as a client does that has crashed."""
        linger = struct.pack('ii', 1, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()

    def close(self):
        self._stream.close()
        self._socket.close()

    def _headers(self):
        headers = {}
        while (line := self._stream.readline()) != b'\r\n':
            if not line:
                raise ConnectionError('the answer ends in its head')
            name, value = re.fullmatch(rb'([!-9;-~]+): (.*)\r\n', line).groups()
            name = name.decode().lower()
            assert name not in headers, f'{name} comes twice'
            headers[name] = value.decode('latin-1')
        return headers
