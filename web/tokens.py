"""Bearer tokens: the accepted tokens, and the tokens file."""

import errno
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from web.errors import ErrorValue, Fault

log = logging.getLogger('plants')

LONGEST = 2**20  # bytes of a tokens file
# For a start without a token. In hexadecimal: commands take "-..." for an option.
MADE_TOKEN = secrets.token_hex()
EXAMPLE = '{"id": 1, "name": "Fern", "tag": "shade"}'  # as on every page
_CHANGES = 'it changes all the time'
_PASSING = _CHANGES, os.strerror(errno.EAGAIN)  # of a lease, which Samba gives back
_version = attrgetter('st_dev', 'st_ino', 'st_size', 'st_mtime_ns', 'st_ctime_ns')


class _Known(NamedTuple):  # replaced as a whole
    names: dict[bytes, str]  # by the digests of tokens; without any nobody is accepted
    version: tuple[int, ...] = ()  # of the file that has them
    fault: str = ''  # of the file at the last look


class Tokens:
    """The accepted bearer tokens, kept as digests: one, several, or by their names.

    A ``ValueError`` says which is not valid, or that there is none, and shows no token.
    """

    failures = memoryview(bytes(8)).cast('q')  # how many changes could not be used
    _refused: frozenset[bytes] = frozenset()  # the digests of tokens for metrics

    def __init__(self, tokens: str | Iterable[str] | Mapping[str, str]) -> None:
        if isinstance(tokens, str):
            tokens = [tokens]
        if not isinstance(tokens, Mapping):  # None if a variable is not set
            tokens = {f'token-{n}': text for n, text in enumerate(tokens or (), 1)}
        names = {_digest(text, name): name for name, text in tokens.items()}
        self._known = _Known(_checked(names, self._refused))

    def refuse(self, token: str) -> None:
        """Never accept a token that is for metrics; a ``ValueError`` if it is here."""
        refused = self._refused | {_digest(token, 'the token for metrics')}
        _checked(self._known.names, refused)
        self._refused = refused

    def find(self, text: str) -> str | None:
        """Return the name of a token, or ``None`` if it is not accepted."""
        self.refresh()
        names, _, fault = self._known
        if not names:
            message = f'no token can be checked now: {fault}'
            raise Fault(ErrorValue.STORE_UNAVAILABLE, message, retry_after='1')
        # Nobody can choose a digest, so the duration of the look-up tells nothing.
        return names.get(hashlib.sha256(text.encode('latin-1')).digest())

    def refresh(self) -> None:
        """Take up a change of the tokens; a master does it before it forks."""


def _digest(token: str, where: str) -> bytes:
    """Return the SHA-256 digest of a token (RFC 6750), or that which is given."""
    match = re.fullmatch('sha256:([0-9a-fA-F]{64})|[A-Za-z0-9._~+/-]+=*', token)
    if not match:
        what = 'letters, digits, -._~+/, = at its end; a digest sha256: and 64 digits'
        raise ValueError(f'{where}: a token has {what}')
    return bytes.fromhex(match[1] or hashlib.sha256(token.encode()).hexdigest())


def _checked(names: dict[bytes, str], refused: frozenset[bytes]) -> dict[bytes, str]:
    """Return the names if there are any, and none is for a token for metrics."""
    if not names:
        raise ValueError('there is no token')
    for digest in refused & names.keys():
        raise ValueError(f'{names[digest]}: it is PLANTS_METRICS_TOKEN')
    return names


class TokensFile(Tokens):
    """Tokens in a file, one a line, read again within seconds after a change.

    A file counts once it was read whole and has not changed for a moment. If it is
    missing or has a fault, the tokens stay. But a process that knows of a newer file
    than it has read accepts no token until it can read one: its own may be revoked.
    """

    CHECK_EVERY = 1.0  # seconds
    _next_look = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # whatever the directory is later
        # Of all processes: the hash of the version that was read last, and failures.
        shared = memoryview(mmap.mmap(-1, 16)).cast('q')
        self._newest, self.failures = shared[:1], shared[1:]
        for _ in range(100):
            self._known = self._look(_Known({}))
            if self._known.fault not in _PASSING:
                break
            time.sleep(self.CHECK_EVERY / 20)
        if self._known.fault:
            raise ValueError(f'{path}: {self._known.fault}')

    def refresh(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self.CHECK_EVERY
        known = self._look(before := self._known)
        if known == before or self._known is not before:  # another thread was quicker
            return
        self._known = known
        self.failures[0] += bool(known.fault)
        what, write = known.fault or 'read', log.error if known.fault else log.info
        if known.fault or known.version != before.version:
            write('%s: %s; tokens now: %d', self.path, what, len(known.names))

    def _look(self, known: _Known) -> _Known:
        """Return what is known after a look at the file, which waits for no FIFO."""
        names, version, _ = known
        seen, fault, is_newest = version, '', self._newest[0] == hash(version)
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > LONGEST:
                raise ValueError(f'it is not a regular file of at most {LONGEST} bytes')
            # A young one is perhaps being written.
            is_young = abs(time.time() - status.st_ctime) < 2 * self.CHECK_EVERY
            seen = _version(status)
            if not (is_young or (seen == version and is_newest)):
                with open(os.open(self.path, os.O_NONBLOCK), 'rb') as file:
                    found = _checked(_parse(file.read(LONGEST)), self._refused)
                    read = _version(os.fstat(file.fileno()))
                if seen == read == _version(self.path.stat()):  # and not changed
                    names, version = found, seen
                    self._newest[0] = hash(version)
        except Exception as ex:
            fault = getattr(ex, 'strerror', '') or str(ex) or type(ex).__name__
            if version != seen and not isinstance(ex, ValueError):
                version = ()  # the file may revoke any token
        if self._newest[0] != hash(version):
            return _Known({}, (), fault or _CHANGES)
        return _Known(names, version, fault)


def _parse(text: bytes) -> dict[bytes, str]:
    """Return the names of the tokens of a file by their digests; # begins a comment."""
    names: dict[bytes, str] = {}
    for number, line in enumerate(re.split('\r\n?|\n', text.decode('utf-8-sig')), 1):
        words = re.split(r'(?:^|\s)#', line)[0].strip().split(maxsplit=1)
        if words:
            name = words[0] if len(words) == 2 else f'token-{number}'
            names[_digest(words[-1], f'line {number}')] = name
    return names


def show_token(url: str) -> None:
    """Print the made token, once, to the standard error, with what uses it."""
    # Nobody else needs to see it: no proxy, and no server sees what follows the #.
    page = '' if url.startswith('-') else f'Or open {url}/docs#token={MADE_TOKEN}\n'
    print(
        f'No token is configured, so this start made one. Add a plant with it:\n\n'
        f"    curl --noproxy '*' {url}/plants -H 'Authorization: Bearer {MADE_TOKEN}' "
        f"-H 'Content-Type: application/json' -d '{EXAMPLE}'\n\n"
        f'{page}The next start makes another. To keep it: PLANTS_TOKENS={MADE_TOKEN}\n',
        file=sys.stderr,
    )
