"""Requests: bytes to WSGI environments, by one strict grammar (RFC 9112).

TODO figures.

The grammar is the check: what does not match is refused, and the connection ends.
"""

import re
from functools import lru_cache
from io import BytesIO
from ipaddress import IPv6Address
from typing import Any
from urllib.parse import unquote

MAX_HEAD = 32 * 1024  # bytes, also of trailers
MAX_LINE = 8 * 1024  # bytes of a request line (RFC 9112, section 3: at least 8,000)
MAX_FIELDS = 100
MAX_CHUNK_LINE = 4 * 1024  # bytes: a size and its extensions
# Bytes of chunks that are not data, beyond what chunks of a byte need.
MAX_EXCESS = 16 * 1024

# RFC 3986, appendix A.
_CHAR = r"(?:[-A-Za-z0-9._~!$&'()*+,;=]++|%[0-9A-Fa-f]{2})"
_ADDRESS = r"(?P<ipv6>[0-9A-Fa-f:.]+)|[vV][0-9A-Fa-f]+\.[-A-Za-z0-9._~!$&'()*+,;=:]+"
_AUTHORITY = rf'(?:\[(?:{_ADDRESS})\]|{_CHAR}*+)(?::[0-9]*+)?'  # without user info
_PATH = rf'(?:/(?:{_CHAR}|[:@/]++)*+)?'
# What browsers leave as it is may be in a query, too (URL Standard): []|^\{}` and %.
_QUERY = r'[!$-;=?-~]*+'

# RFC 9110, sections 5.6.2 and 5.5: no control characters but tabs.
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_VALUE = r'[\t -~\x80-\xff]*+'
# Section 5 of RFC 9112: no white space before the colon (5.1), no folding (5.2).
_FIELDS = rf'(?:{_TOKEN}:{_VALUE}\r\n){{0,{MAX_FIELDS}}}+'

_HEAD = re.compile(
    # Section 3.1. The methods that are registered have no small letters.
    r"(?P<method>[!#$%&'*+.^_`|~0-9A-Z-]{1,20}) "
    # Section 3.2.1, origin-form, or 3.2.2, absolute-form, whose host is not empty (RFC
    # 9110, section 4.2.1). Not 3.2.3: this is no proxy for CONNECT.
    r'(?P<target>(?=/|[Hh])(?:[Hh][Tt]{2}[Pp][Ss]?://(?=[^:/? ])' + _AUTHORITY + r')?'
    rf'(?P<path>{_PATH})(?:\?(?P<query>{_QUERY}))?'
    # Section 3.2.4, asterisk-form.
    r'|(?<=^OPTIONS )\*)'
    # Section 2.3.
    rf' HTTP/1\.(?P<minor>[01])\r\n(?P<fields>{_FIELDS})\r\n'
)
_HOST = re.compile(_AUTHORITY)  # section 3.2
# Section 2.2: a line feed alone ends no line here, so such a head would never end.
_BARE_FEED = re.compile(rb'(?<!\r)\n')

# Section 7.1, without the white space that only recipients of old need to allow.
_QUOTED = r'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_EXTENSION = rf';{_TOKEN}(?:=(?:{_TOKEN}|{_QUOTED}))?+'
_CHUNK = re.compile(rf'([0-9A-Fa-f]{{1,16}})(?:{_EXTENSION})*+\r\n'.encode('latin-1'))
_TRAILERS = re.compile(rf'{_FIELDS}\r\n'.encode('latin-1'))

# RFC 9110, section 5.3: fields that are no lists, so that two cannot be combined.
_SINGLE = frozenset(['HTTP_HOST', 'CONTENT_TYPE', 'CONTENT_LENGTH'])


@lru_cache(maxsize=256)
def _key(name: str) -> str:
    """Return the key of a field in an environment, or nothing for a name with ``_``.

    It would have the key of a name with a hyphen, which a proxy may have checked.
    """
    if '_' in name or not name:
        return ''
    key = name.upper().replace('-', '_')
    return key if key in ('CONTENT_TYPE', 'CONTENT_LENGTH') else f'HTTP_{key}'


def _is_sound(match: re.Match[str] | None) -> bool:
    """Whether there is a match, and an IPv6 address in it is one."""
    try:
        return match is not None and bool(IPv6Address(match['ipv6'] or '::1'))
    except ValueError:
        return False


@lru_cache(maxsize=32)
def _is_host(value: str) -> bool:
    return _is_sound(_HOST.fullmatch(value))


def _refusal(head: bytes) -> int:
    """Return the status that refuses a head which is too long or does not match."""
    if (head + b'\r').find(b'\r') > MAX_LINE:
        return 414
    is_long = len(head) > MAX_HEAD or head.count(b'\r\n') > MAX_FIELDS + 2
    return 431 if is_long else 400


class Request:
    """A request: what its head says, and its body.

    Attributes:
        environ: The WSGI environment.
        fault: The status with which the server refuses the request, or 0.
        keeps: Whether the client allows another request on the connection.
        expects: Whether the client waits for 100 (RFC 9110, section 10.1.1).
    """

    def __init__(self, head: bytes, common: dict[str, Any], limit: int) -> None:
        """Read a head.

        Args:
            head: All of it, or as much of it as shows that it is to be refused.
            common: What the environments of a connection have in common.
            limit: The length of the longest body that is read, in bytes.
        """
        self.environ = environ = common.copy()
        self.fault, self.keeps, self.expects = 0, False, False
        self._limit, self._length, self._excess = limit, 0, 0
        self._body = bytearray()
        match = _HEAD.fullmatch(head.decode('latin-1'))
        if match is None or len(head) > MAX_HEAD or head.find(b'\r') > MAX_LINE:
            self.fault = _refusal(head)
            return
        method, target, _, path, query, minor, fields = match.groups()
        for line in fields.split('\r\n'):
            name, _, value = line.partition(':')
            if key := _key(name):
                value = value.strip(' \t')
                if key not in environ:
                    environ[key] = value
                elif key in _SINGLE:
                    self.fault = 400
                else:
                    environ[key] += f',{value}'
        environ['REQUEST_METHOD'] = method
        environ['SERVER_PROTOCOL'] = f'HTTP/1.{minor}'
        environ['RAW_URI'] = target
        environ['QUERY_STRING'] = query or ''
        path = target if path is None else path  # None for *
        path = unquote(path, 'latin-1') if '%' in path else path
        if mount := environ['SCRIPT_NAME']:
            rest = path.removeprefix(mount)
            if rest == path or rest[:1] not in ('', '/'):
                self.fault = 404
            path = rest
        environ['PATH_INFO'] = path
        # Section 9.3.
        options = environ.get('HTTP_CONNECTION', '').lower().replace(' ', '').split(',')
        is_new = minor == '1'
        self.keeps = 'close' not in options if is_new else 'keep-alive' in options
        # Section 3.2: a request of HTTP/1.1 has a Host. ('/' is none.)
        if not _is_host(environ.get('HTTP_HOST', '/' if is_new else '')) or (
            match['ipv6'] and not _is_sound(match)
        ):
            self.fault = 400
        if 'HTTP_EXPECT' in environ:
            self.expects = is_new
            if environ['HTTP_EXPECT'].lower() != '100-continue':
                self.fault = self.fault or 417
        self._frame(is_new)

    def _frame(self, is_new: bool) -> None:
        """Find out how the body ends (section 6.3), or refuse the request."""
        environ = self.environ
        length = environ.get('CONTENT_LENGTH', '0')
        coding = environ.pop('HTTP_TRANSFER_ENCODING', None)
        if coding is not None:
            # 6.1: only chunked, not in HTTP/1.0, and not with a length.
            if coding.lower() != 'chunked' or not is_new or 'CONTENT_LENGTH' in environ:
                self.fault = 400
            self._length = -1
        elif length.isdecimal() and length.isascii() and len(length) < 19:
            self._length = int(length)
            # The application refuses a longer body, which is not read.
            self.keeps = self.keeps and self._length <= self._limit
        else:
            self.fault = 400

    def take(self, received: bytearray) -> bool:
        """Take the body from the beginning of the bytes; return whether it is whole."""
        length = self._length
        if self.fault or length > self._limit:
            return True
        if length < 0:
            return self._take_chunks(received)
        if len(received) < length:
            return False
        if length:
            self._body = received[:length]
            del received[:length]
        return True

    def _take_chunks(self, received: bytearray) -> bool:
        while match := _CHUNK.match(received):
            size, start = int(match[1], 16), match.end()
            if not size:
                return self._take_trailers(received, start)
            end = start + size
            if len(self._body) + size > self._limit:  # read no further
                return self._end(len(self._body) + size)
            if len(received) < end + 2:
                return False
            if received[end : end + 2] != b'\r\n':
                break
            self._body += received[start:end]
            del received[: end + 2]
            self._excess += max(0, start - 16 - 2 * size)
            if self._excess > MAX_EXCESS:
                break
        else:
            if len(received) <= MAX_CHUNK_LINE and b'\n' not in received:
                return False
        self.fault = 400
        return True

    def _take_trailers(self, received: bytearray, start: int) -> bool:
        """Take the end of a body in chunks; its fields are dropped (section 7.1.2)."""
        end = received.find(b'\r\n\r\n', start - 2) + 4
        if end < 4 and len(received) - start <= MAX_HEAD:
            return False
        if (
            end < 4
            or end - start > MAX_HEAD
            or not _TRAILERS.fullmatch(received, start, end)
        ):
            self.fault = 400
            return True
        del received[:end]
        return self._end(len(self._body), self.keeps)

    def end(self, received: bytearray) -> None:
        """End the body early: the client sends no more. The application notices."""
        if self._length < 0:
            self._end(len(self._body) + 1)
        else:
            self._body, self.keeps = received, False

    def _end(self, length: int, keeps: bool = False) -> bool:
        # The application hears a length, however the body was framed.
        self.environ['CONTENT_LENGTH'] = str(length)
        self.keeps = keeps
        return True

    def body(self) -> BytesIO:
        return BytesIO(self._body)


def read_head(
    received: bytearray, seen: int, common: dict[str, Any], limit: int
) -> Request | None:
    """Take a head from the beginning of the bytes, or what shows that it is wrong.

    Return None if there must be more of it; the first ``seen`` bytes were looked at.
    """
    # Section 2.2: an empty line before a request is ignored.
    start = 2 if received.startswith(b'\r\n') else 0
    end = received.find(b'\r\n\r\n', max(start, seen - 3)) + 4
    if end < 4:
        size = len(received) - start
        is_wrong = (
            size > MAX_HEAD
            or (size > MAX_LINE and received.find(b'\n', start) < 0)
            or (size and received[start] <= 32)  # TLS, for example
            or _BARE_FEED.search(received, max(start, seen - 1))
        )
        if not is_wrong or received == b'\r':
            return None
        end = len(received)
    head = bytes(received[start:end])
    del received[:end]
    return Request(head, common, limit)
