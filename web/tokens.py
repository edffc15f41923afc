"""Bearer tokens: the accepted tokens, and the tokens file."""

import hashlib
import hmac
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from schemas import read_file

log = logging.getLogger('plants')


class Token(NamedTuple):
    """What is known about an accepted token."""

    name: str  # for the log
    scope: str = 'plants'  # or metrics: it reads /metrics and does nothing else


class Tokens:
    """The accepted bearer tokens, kept as digests.

    Without names they are ``token-1``, ``token-2``. No ``ValueError`` shows a token.
    """

    # Called when a changed file cannot be used; metrics count it.
    on_failed_reload: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, tokens: str | Iterable[str] | Mapping[str, str]) -> None:
        if isinstance(tokens, str):
            tokens = [tokens]
        if not isinstance(tokens, Mapping):
            # ``tokens`` may be None, from a variable that is not set.
            tokens = {f'token-{n}': text for n, text in enumerate(tokens or (), 1)}
        self._accept(
            {_digest(text, name): Token(name) for name, text in tokens.items()}
        )

    def _accept(self, tokens: dict[bytes, Token]) -> None:
        """Accept these tokens, given by their digests, and no others."""
        if not tokens:
            raise ValueError('there is no token')
        if not all(token.name.isprintable() for token in tokens.values()):
            raise ValueError('the name of a token may have only printable characters')
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, text: str) -> Token | None:
        """Return what is known about a token, or ``None`` if it is not accepted.

        The duration does not depend on how much of the text is right.
        """
        digest = hashlib.sha256(text.encode('latin-1')).digest()
        found = None
        for known, token in self._tokens.items():
            if hmac.compare_digest(known, digest):
                found = token
        return found

    def scope_of(self, path: str) -> str:
        """Return the scope that a token needs for a path.

        Every token may read ``/metrics`` as long as no token is for metrics alone.
        """
        scopes = (token.scope for token in self._tokens.values())
        return 'metrics' if path == '/metrics' and 'metrics' in scopes else 'plants'


def _digest(token: str, where: str) -> bytes:
    """Return the SHA-256 digest of a token, or the digest that ``sha256:`` gives."""
    if not isinstance(token, str):
        raise ValueError(f'{where}: a token is text')
    scheme, colon, digits = token.partition(':')
    if colon:
        if scheme != 'sha256' or not re.fullmatch('[0-9a-fA-F]{64}', digits):
            raise ValueError(f'{where}: a digest is sha256: and 64 hexadecimal digits')
        return bytes.fromhex(digits)
    # RFC 6750, section 2.1: b64token.
    if not re.fullmatch(r'[A-Za-z0-9._~+/-]+=*', token):
        raise ValueError(
            f'{where}: a token may have only letters, digits, -._~+/ and = at its end'
        )
    return hashlib.sha256(token.encode()).digest()


class TokensFile(Tokens):
    """Tokens in a file, one entry a line, read again when the file has changed.

    While the file is broken, the old tokens stay: a forked process has its parent's.
    """

    CHECK_EVERY = 0.5  # seconds
    CHECK_WITHIN = 0.25  # seconds; a file on a dead mount must not stop the requests

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_check = time.monotonic() + self.CHECK_EVERY
        self._version = self._stat()
        self._reader = Thread()  # not started
        self._read()

    def find(self, text: str) -> Token | None:
        # One thread at a time: it may hang forever. A forked child finds it ended.
        if time.monotonic() >= self._next_check and not self._reader.is_alive():
            self._next_check = time.monotonic() + self.CHECK_EVERY
            self._reader = Thread(target=self._refresh, daemon=True)
            self._reader.start()
            self._reader.join(self.CHECK_WITHIN)
        return super().find(text)

    def _refresh(self) -> None:
        before, self._version = self._version, self._stat()
        if self._version == before:
            return
        try:
            self._read()
        except ValueError as ex:
            log.error('%s; the tokens stay as they were', ex)
            self.on_failed_reload()
        else:
            log.info('%s: tokens that are accepted now: %d', self._path, len(self))

    def _stat(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except (OSError, ValueError):  # ValueError: U+0000 in the path
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _read(self) -> None:
        try:
            self._accept(_parse(read_file(self._path).decode('utf-8-sig')))
        except (OSError, ValueError) as ex:
            reason = ex.strerror if isinstance(ex, OSError) else ex
            raise ValueError(f'{self._path}: {reason}') from ex


def _parse(text: str) -> dict[bytes, Token]:
    """Return the tokens of a tokens file by their digests; # begins a comment."""
    tokens: dict[bytes, Token] = {}
    lines: dict[bytes, int] = {}  # the first line of each digest
    for number, line in enumerate(re.split('\r\n?|\n', text), 1):
        words = re.split(r'(?:^|\s)#', line)[0].split()
        if words[2:] not in ([], ['metrics']):
            raise ValueError(
                f'line {number}: it is not TOKEN, NAME TOKEN or NAME TOKEN metrics'
            )
        if words:
            name = words[0] if len(words) > 1 else f'token-{number}'
            digest = _digest(words[:2][-1], f'line {number}')
            token = Token(name, *words[2:])
            first = lines.setdefault(digest, number)
            if tokens.setdefault(digest, token).scope != token.scope:
                raise ValueError(f'lines {first} and {number}: one token, two scopes')
            tokens[digest] = token
    return tokens


def make_token() -> str:
    """Make a token for a start without a configured one: no service runs open."""
    return secrets.token_hex()  # no "-" at its start: commands take it for an option


def show_token(token: str, url: str) -> None:
    """Print a made token, once, to the standard error, with a ``curl`` line."""
    print(
        f'No token is configured (PLANTS_TOKENS), so this start made one:\n\n'
        f'    {token}\n\n'
        f'Add a plant with it:\n\n'
        f'    curl {url}/plants -H "Authorization: Bearer {token}" '
        f"-H 'Content-Type: application/json' "
        f'-d \'{{"id": 1, "name": "Fern", "tag": "shade"}}\'\n\n'
        f'Each start makes a new token; the tokens of earlier starts are not valid. '
        f'To keep this one, start with PLANTS_TOKENS={token}\n',
        file=sys.stderr,
        flush=True,
    )
