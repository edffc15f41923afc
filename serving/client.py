"""A client's connection: time limits, bounded buffers, and an orderly end.

gunicorn limits only the time between two requests: a client that sends a byte a minute
would keep its connection forever, and one that reads no answer would fill the memory.
A connection that is closed with unread bytes is reset, and the client may lose the last
answer (RFC 9112, section 9.6).
"""

import math
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import gevent

from serving.scheduler import Turns

FIRST_REQUEST = 15  # seconds for a new connection to begin its first request
REQUEST_TIMEOUT = 30  # seconds for one request, from its first byte to its last
# Seconds for a client to take its last answer, for one that is idle when its worker
# stops, and for one that is stalled when others wait for a connection.
LINGER = 2
LINGER_RATE = 256 * 1024  # bytes a second that a client must send to get more time

# Bytes of answers that are buffered: a client may send many requests and read nothing.
MAX_BUFFERED = 16 * 1024
SLICE = 64 * 1024  # bytes sent or received before other clients are served
# One wait, or one read, takes as much CPU as PIECE bytes. So 2,000 bytes of a request
# may come one by one (1,000 if the worker waits for each), and any number in longer
# pieces.
PIECE, MAX_WASTED = 256, 256 * 2_000

# What the worker waits for. A full worker expires its stalled clients in this order.
IDLE, HEAD, BODY, ANSWER = range(4)
TCP_INFO = getattr(socket, 'TCP_INFO', -1)  # of Linux


class ClientGone(OSError):
    """The connection has failed; no other ``OSError`` of a request has this meaning."""


class Client:
    """A client's socket, with a time limit for each wait for the client.

    Answers are buffered until the worker waits for the client. Every method that waits
    raises ``ClientGone`` if the connection has failed.
    """

    deadline: float  # when to expire the client (monotonic); infinite after that
    stage: int  # IDLE: the next byte begins a request
    since: float  # when the stage began or made progress, in seconds (monotonic)
    wasted: int  # work for this request beyond its bytes, counted in bytes
    is_awaited = False  # whether the worker waits for the client at this moment
    is_answered = False  # whether the client has got the beginning of an answer
    has_ended = False  # whether the client has sent its last byte, or is expired
    looks_like_tls = False  # whether the last request began like a TLS handshake

    def __init__(self, sock: socket.socket, turns: Turns) -> None:
        self._sock = sock  # does not block
        self._read = sock.recv
        self._waits_before_read = True
        self._turns = turns
        loop = gevent.get_hub().loop
        self._readable, self._writable = (loop.io(sock.fileno(), n) for n in (1, 2))
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._received = 0  # since other clients were served
        self.begin(IDLE, FIRST_REQUEST)

    def start_tls(self, context: ssl.SSLContext) -> None:
        """Have the first read make a TLS handshake."""
        self._sock = context.wrap_socket(
            self._sock, server_side=True, do_handshake_on_connect=False
        )
        self._read = self._sock.recv
        self._waits_before_read = False  # the rest of a record may be in memory

    def begin(self, stage: int, seconds: float | None = None) -> None:
        """Begin a stage with a time limit, by default that of a request."""
        self.stage, self.wasted = stage, 0
        self.since = time.monotonic()
        self.deadline = self.since + (REQUEST_TIMEOUT if seconds is None else seconds)

    def recv(self, size: int) -> bytes:
        """Receive bytes; none at the end of the stream and after a limit."""
        if self._buffer:
            self.flush()
        # Noted first: what has arrived when expire() ends the wait is still read.
        work, has_ended = PIECE, self.has_ended
        if self.stage == IDLE and self._waits_before_read:
            self._wait(self._turns.wait_for_data, self._readable)
        while not has_ended and max(self.wasted, work) <= MAX_WASTED:
            try:
                data = self._read(size)
                break
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(self._turns.wait_for_data, self._readable)
                work += PIECE
            except OSError as ex:
                raise ClientGone from ex
        else:  # the client has ended, or cost too much: its request is refused
            self.wasted += work
            self.has_ended = True
            return b''
        self.has_ended = self.has_ended or not data
        if self.stage == IDLE and data:
            self.looks_like_tls = data.startswith(b'\x16\x03')
            self.begin(HEAD)
            return data
        self.wasted += max(0, work - len(data))
        if len(data) >= PIECE and self.stage == BODY:
            self.since = time.monotonic()
        self._received += max(len(data), 4 * work)
        if self._received > SLICE:
            self._received = 0
            self._turns.wait_for_others()
        return data

    def _wait(self, wait: Callable[[Any], object], watcher: Any) -> None:
        self.is_awaited = True
        wait(watcher)
        self.is_awaited = False

    def sendall(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        buffer, self._buffer = self._buffer, []
        if self._buffered <= 2 * MAX_BUFFERED:  # larger data is shared, not copied
            buffer = [b''.join(buffer)]
        self._buffered = 0
        self.is_answered = True
        before, self.stage = (self.stage, self.since, self.deadline), ANSWER
        try:
            for data in buffer:
                rest = memoryview(data)
                while rest:
                    self.since = time.monotonic()
                    self.deadline = self.since + REQUEST_TIMEOUT
                    try:
                        rest = rest[self._sock.send(rest[:SLICE]) :]
                    except (BlockingIOError, ssl.SSLWantWriteError):
                        self._wait(gevent.get_hub().wait, self._writable)
                    if rest:
                        self._turns.wait_for_others()
        except OSError as ex:
            raise ClientGone from ex
        finally:
            self.stage, self.since, self.deadline = before

    def linger(self) -> None:
        """Let the client take its last answer, and read the rest of what it sends."""
        self.flush()
        # NOTE: not the shutdown() of TLS, which another greenlet may be in.
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        self._read = partial(socket.socket.recv, self._sock)  # no need to decrypt it
        self.has_ended = math.isinf(self.deadline)  # false if only wasteful
        self.begin(BODY, LINGER)
        last = self.since + REQUEST_TIMEOUT
        while size := len(self.recv(MAX_BUFFERED)):
            self.deadline = min(self.deadline + size / LINGER_RATE, last)

    # Called by the worker while the greenlet of the connection may wait.

    def stalled_for(self) -> float:
        """Return for how many seconds the worker has waited for the client."""
        seconds = time.monotonic() - self.since
        with suppress(OSError):  # a Unix socket, or another system
            info = self._sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 56)
            sent, _, received = struct.unpack_from('3I', info, 44)  # milliseconds ago
            # Count the wait for the accept, but not the idle time before a request.
            has_begun = self.stage == BODY or (self.stage == HEAD and self.is_answered)
            seconds = max(seconds, (received if has_begun else sent) / 1000)
        return seconds

    def expire(self) -> None:
        """End all waits for the client: a read finds the end, a send fails."""
        self.has_ended = True
        self.deadline = math.inf
        how = socket.SHUT_RDWR if self.stage == ANSWER else socket.SHUT_RD
        with suppress(OSError):  # the connection has ended already
            socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        self._readable.close()
        self._writable.close()
        self._sock.close()
