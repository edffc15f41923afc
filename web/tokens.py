"""Bearer tokens: the accepted tokens, and the tokens file."""

import hashlib
import hmac
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger('plants')


class Tokens:
    """The accepted bearer tokens, kept as digests: one, several, or by their names.

    A ``ValueError`` says which is not valid, or that there is none, and shows no token.
    """

    # Called when a changed file cannot be used; metrics count it.
    on_failed_reload: Callable[[], None] = staticmethod(lambda: None)
    _refused: bytes | None = None  # the digest of a token that is for something else

    def __init__(self, tokens: str | Iterable[str] | Mapping[str, str]) -> None:
        if isinstance(tokens, str):
            tokens = [tokens]
        if not isinstance(tokens, Mapping):  # None if a variable is not set
            tokens = {f'token-{n}': text for n, text in enumerate(tokens or (), 1)}
        self._accept({_digest(text, name): name for name, text in tokens.items()})

    def _accept(self, names: dict[bytes, str]) -> None:
        if not names:
            raise ValueError('there is no token')
        if self._refused in names:
            raise ValueError(f'{names[self._refused]}: it is PLANTS_METRICS_TOKEN')
        self._names = names

    def refuse(self, token: str) -> None:
        """Never accept a token that is for metrics; a ``ValueError`` if it is here."""
        self._refused = _digest(token, 'the token for metrics')
        self._accept(self._names)

    def refresh(self) -> None:
        """Look for changes now."""

    def __len__(self) -> int:
        return len(self._names)

    def find(self, text: str) -> str | None:
        """Return the name of a token, or ``None`` if it is not accepted."""
        digest = hashlib.sha256(text.encode('latin-1')).digest()
        found = None
        for known, name in self._names.items():  # all: the duration must tell nothing
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(token: str, where: str) -> bytes:
    """Return the SHA-256 digest of a token, or the digest that ``sha256:`` gives."""
    scheme, colon, digits = token.partition(':')
    if colon:
        if scheme != 'sha256' or not re.fullmatch('[0-9a-fA-F]{64}', digits):
            raise ValueError(f'{where}: a digest is sha256: and 64 hexadecimal digits')
        return bytes.fromhex(digits)
    if not re.fullmatch(r'[A-Za-z0-9._~+/-]+=*', token):  # RFC 6750, section 2.1
        raise ValueError(f'{where}: a token has letters, digits, -._~+/, = at its end')
    return hashlib.sha256(token.encode()).digest()


class TokensFile(Tokens):
    """Tokens in a file, one a line, read again after a change that can be read."""

    CHECK_EVERY = 1.0  # seconds

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_check = time.monotonic() + self.CHECK_EVERY
        self._version = self._stat()
        self._read()

    def find(self, text: str) -> str | None:
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + self.CHECK_EVERY
            before, self._version = self._version, self._stat()
            try:
                if self._version != before:
                    self._read()
                    log.info('%s: tokens accepted now: %d', self._path, len(self))
            except ValueError as ex:
                log.error('%s; the tokens stay as they were', ex)
                self.on_failed_reload()
        return super().find(text)

    def _stat(self) -> tuple[int, ...]:
        with suppress(OSError, ValueError):  # ValueError: U+0000 in the path
            status = self._path.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return ()

    def _read(self) -> None:
        try:
            if not self._path.is_file() and self._path.exists():
                raise ValueError('it is not a regular file')
            self._accept(_parse(self._path.read_bytes().decode('utf-8-sig')))
        except (OSError, ValueError) as ex:
            reason = ex.strerror if isinstance(ex, OSError) else ex
            raise ValueError(f'{self._path}: {reason}') from ex


def _parse(text: str) -> dict[bytes, str]:
    """Return the names of the tokens of a file by their digests; # begins a comment."""
    names: dict[bytes, str] = {}
    for number, line in enumerate(re.split('\r\n?|\n', text), 1):
        words = re.split(r'(?:^|\s)#', line)[0].split()
        if len(words) > 2:
            raise ValueError(f'line {number}: not NAME TOKEN; see PLANTS_METRICS_TOKEN')
        if words:
            name = words[0] if len(words) == 2 else f'token-{number}'
            names[_digest(words[-1], f'line {number}')] = name
    return names


def make_token() -> str:
    """Make a token for a start without a configured one: no service runs open."""
    return secrets.token_hex()  # no "-" at its start: commands take it for an option


def show_token(token: str, url: str) -> None:
    """Print a made token, once, to the standard error, with a ``curl`` line."""
    header, plant = f'Authorization: Bearer {token}', '{"id": 1, "name": "Fern"}'
    text = (
        f'No token is configured, so this start made one. Add a plant with it:\n\n'
        f"    curl {url}/plants -H '{header}' -H 'Content-Type: application/json' "
        f"-d '{plant}'\n\n"
        f'The next start makes another one. To keep it: PLANTS_TOKENS={token}\n'
    )
    print(text, file=sys.stderr, flush=True)
