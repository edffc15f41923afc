"""Bearer tokens: the accepted tokens, and the tokens file."""

import hashlib
import hmac
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger('plants')


class Token(NamedTuple):
    """What is known about an accepted token."""

    name: str  # for the log
    scope: str = 'plants'  # or metrics: it reads /metrics and does nothing else


class Tokens:
    """The accepted bearer tokens, kept as digests.

    Without names they are named by their position: ``token-1``, ``token-2``. A
    ``ValueError`` about them never has the text of a token.
    """

    # Called when a changed file cannot be used; metrics count it.
    on_failed_reload: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, tokens: str | Iterable[str] | Mapping[str, str]) -> None:
        if isinstance(tokens, str):
            tokens = [tokens]
        if not isinstance(tokens, Mapping):
            # It may be None: a variable that is not set.
            tokens = {f'token-{n}': text for n, text in enumerate(tokens or (), 1)}
        self._accept(
            (_digest(text, name), Token(name)) for name, text in tokens.items()
        )

    def _accept(self, tokens: Iterable[tuple[bytes, Token]]) -> None:
        """Accept these tokens, given by their digests, and no others."""
        accepted = dict(tokens)
        if not accepted:
            raise ValueError('there is no token')
        if not all(token.name.isprintable() for token in accepted.values()):
            raise ValueError('the name of a token may have only printable characters')
        self._tokens = accepted

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, text: str) -> Token | None:
        """Return what is known about a token, or ``None`` if it is not accepted.

        The time it takes does not depend on the text, or on how much of it is right.
        """
        digest = hashlib.sha256(text.encode('latin-1')).digest()
        found = None
        for known, token in self._tokens.items():
            if hmac.compare_digest(known, digest):
                found = token
        return found

    def scope_of(self, path: str) -> str:
        """Return the scope that a token needs for a path.

        Every token may read ``/metrics`` as long as none is for that alone.
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
            raise ValueError(f'{where}: it is not sha256: and 64 hexadecimal digits')
        return bytes.fromhex(digits)
    # RFC 6750, section 2.1: b64token.
    if not re.fullmatch(r'[A-Za-z0-9._~+/-]+=*', token):
        raise ValueError(
            f'{where}: a token may have only letters, digits, -._~+/ and = at its end'
        )
    return hashlib.sha256(token.encode()).digest()


class TokensFile(Tokens):
    """Tokens in a file, one entry a line, read again when the file has changed.

    A forked process inherits the tokens: while the file is broken, a new worker accepts
    what its parent has read.
    """

    CHECK_EVERY = 0.5  # seconds

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_check = time.monotonic() + self.CHECK_EVERY
        self._version = self._stat()
        self._read()

    def find(self, text: str) -> Token | None:
        if time.monotonic() >= self._next_check:
            self._refresh()
        return super().find(text)

    def _refresh(self) -> None:
        # Two threads may both do this; then both read the same file.
        self._next_check = time.monotonic() + self.CHECK_EVERY
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
            self._accept(_parse(self._path.read_text('utf-8-sig').split('\n')))
        except (OSError, ValueError) as ex:
            reason = ex.strerror if isinstance(ex, OSError) else ex
            raise ValueError(f'{self._path}: {reason}') from ex


def _parse(lines: Iterable[str]) -> Iterator[tuple[bytes, Token]]:
    """Yield the digests and tokens of a tokens file; # begins a comment."""
    for number, line in enumerate(lines, 1):
        words = re.split(r'(?:^|\s)#', line)[0].split()
        if words[2:] not in ([], ['metrics']):
            raise ValueError(
                f'line {number}: it is not TOKEN, NAME TOKEN or NAME TOKEN metrics'
            )
        if words:
            name = words[0] if len(words) > 1 else f'token-{number}'
            digest = _digest(words[:2][-1], f'line {number}')
            yield digest, Token(name, *words[2:])


def make_token(address: str) -> str:
    """Make a token, and print it with a ``curl`` line for an address.

    It is not in the log: log files may be kept and read by others.
    """
    token = secrets.token_hex()  # never an option of a command, like -token
    print(
        f'No token is configured (PLANTS_TOKENS), so this start made one:\n\n'
        f'    {token}\n\n'
        f'Add a plant with it:\n\n'
        f"    curl {address}/plants -H 'Authorization: Bearer {token}' "
        f"-H 'Content-Type: application/json' "
        f'-d \'{{"id": 1, "name": "Fern", "tag": "shade"}}\'\n\n'
        f'Each start makes another token, and those before it are not valid any more. '
        f'To keep this one, start with PLANTS_TOKENS={token}\n',
        file=sys.stderr,
    )
    return token
