"""A client's connection: time limits, bounded buffers, and an orderly end.

gunicorn limits only the time between two requests: a client that sends a byte a minute
would keep its connection forever, and one that reads no answer would fill the memory.
A connection that is closed with unread bytes is reset, and the client may lose the last
answer (RFC 9112, section 9.6).
"""

import math
import socket
import time
from contextlib import suppress
from typing import Any

import gevent
from gevent.socket import socket as GeventSocket

from serving.scheduler import Turns

FIRST_REQUEST = 15  # seconds for a new connection to begin its first request
REQUEST_TIMEOUT = 30  # seconds for one request, from its first byte to its last
# Seconds for a client to take its last answer, and for one that is idle when its worker
# stops or has as many connections as it may have.
LINGER = 2
LINGER_RATE = 256 * 1024  # bytes a second that a client must send to have longer

# Bytes of answers that are buffered: a client may send many requests and read nothing.
MAX_BUFFERED = 64 * 1024
SLICE = 64 * 1024  # bytes sent or received before other clients have a turn


class ClientGone(OSError):
    """A connection has failed, and not a file, for example, of the application."""


class Client:
    """A client's socket, with a time limit for everything that waits for the client.

    Answers are buffered until the worker waits for the client. What waits raises
    ``ClientGone`` if the connection has failed.
    """

    deadline: float  # when the client is expired, in seconds (monotonic)
    is_idle: bool  # whether the next byte begins a request
    idle_since: float  # when it was idle first, if it is, in seconds (monotonic)
    has_ended = False  # whether the client has sent its last byte, or is expired
    looks_like_tls = False  # whether the last request began like a TLS handshake

    def __init__(self, sock: GeventSocket, turns: Turns) -> None:
        self._sock = sock
        self._turns = turns
        self._readable = gevent.get_hub().loop.io(sock.fileno(), 1)
        self._waits_before_read = True
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._is_sending = False
        self._received = 0  # since others had a turn
        self.expect_request(FIRST_REQUEST)

    def start_tls(self, context: Any) -> None:
        """Have the first read make a TLS handshake."""
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        self._waits_before_read = False  # the rest of a record may be in the socket

    def expect_request(self, seconds: float) -> None:
        self.is_idle = True
        self.idle_since = time.monotonic()
        self.deadline = self.idle_since + seconds

    def begin_request(self) -> None:
        self.is_idle = False
        self.deadline = time.monotonic() + REQUEST_TIMEOUT

    def recv(self, size: int) -> bytes:
        """Receive bytes; none at the end of the stream and after the time limit."""
        if self._buffer:
            self.flush()
        if self.is_idle and self._waits_before_read:
            self._turns.wait_for_data(self._readable)  # a read would find nothing
        try:
            data: bytes = b'' if self.has_ended else self._sock.recv(size)
        except OSError as ex:
            raise ClientGone from ex
        self.has_ended = self.has_ended or not data  # it may be expired by now
        if self.is_idle and data:
            self.looks_like_tls = data.startswith(b'\x16\x03')
            self.begin_request()
        else:
            self._received += len(data)
            if self._received > SLICE:
                self._received = 0
                self._turns.wait_for_others()
        return data

    def sendall(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        if self._buffered <= MAX_BUFFERED:
            buffer = [b''.join(buffer)]  # else without a copy: large data is shared
        self._buffered = 0
        deadline, self._is_sending = self.deadline, True
        try:
            for data in buffer:
                rest = memoryview(data)
                while rest:
                    self.deadline = time.monotonic() + REQUEST_TIMEOUT
                    rest = rest[self._sock.send(rest[:SLICE]) :]
                    if rest:
                        self._turns.wait_for_others()
        except OSError as ex:
            raise ClientGone from ex
        finally:
            self._is_sending = False
            self.deadline = deadline

    def linger(self) -> None:
        """Let the client take its last answer, and read the rest of what it sends."""
        self.flush()
        self._shutdown(socket.SHUT_WR)
        self.is_idle = False
        began = time.monotonic()
        self.deadline = began + LINGER
        while data := self.recv(65_536):
            later = self.deadline + len(data) / LINGER_RATE
            self.deadline = min(later, began + REQUEST_TIMEOUT)

    def expire(self) -> None:
        """End all waits for the client: a read finds the end, a send fails."""
        self.has_ended = True
        self.deadline = math.inf
        with suppress(OSError):  # the connection has ended already
            self._shutdown(socket.SHUT_RDWR if self._is_sending else socket.SHUT_RD)

    def _shutdown(self, how: int) -> None:
        # NOTE: TLS has a shutdown of its own, which another greenlet must not begin.
        self._sock._sock.shutdown(how)

    def close(self) -> None:
        self._readable.close()
        self._sock.close()
