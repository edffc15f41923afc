"""The settings of the service: the only reader of the ``PLANTS_`` variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from store import DEFAULT_URL
from store import check_url
from web.middleware import check_origins
from web.tokens import Tokens
from web.tokens import TokensFile

DEFAULT_MAX_BODY_BYTES = 65_536

# Each variable, and what it sets.
VARIABLES = {
    'PLANTS_STORE': (
        'where the plants are kept: memory:, jsonl:PATH or postgresql://... '
        '(default: jsonl:plants.jsonl)'
    ),
    'PLANTS_TOKENS': (
        'accepted tokens, separated by commas; sha256:HEX instead of a token is '
        'its digest (default: a random token, printed at the start)'
    ),
    'PLANTS_TOKENS_FILE': (
        'file with accepted tokens, one a line: TOKEN or NAME TOKEN; a changed '
        'file is read again within a second'
    ),
    'PLANTS_MAX_BODY': f'longest body, in bytes (default: {DEFAULT_MAX_BODY_BYTES})',
    'PLANTS_LOG': 'format of the log: text or json (default: text)',
    'PLANTS_METRICS': '1 serves /metrics for Prometheus (default: 0)',
    'PLANTS_CORS_ORIGINS': (
        'origins whose pages may use the service, separated by commas, or * '
        '(default: none)'
    ),
}


@dataclass(frozen=True)
class Settings:
    """What the environment configures.

    Attributes:
        store: URL of the store.
        tokens: Which tokens are accepted; ``None`` if none is configured.
        max_body_bytes: The longest body that is read.
        log_format: ``text`` or ``json``; for the log handler.
        metrics: Whether ``/metrics`` is served.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.
    """

    store: str
    tokens: Tokens | None
    max_body_bytes: int
    log_format: str
    metrics: bool
    cors_origins: tuple[str, ...]

    @property
    def is_in_memory(self) -> bool:
        """Whether each process would have plants of its own."""
        return self.store == 'memory:'

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the ``PLANTS_`` variables.

        Raises:
            ValueError: One has a bad value or an unknown name, or needs a package that
                is not installed; the message is a sentence for the operator.
        """
        _check_names(environ)
        return cls(
            store=_store_url(environ.get('PLANTS_STORE', DEFAULT_URL)),
            tokens=_tokens(
                environ.get('PLANTS_TOKENS'), environ.get('PLANTS_TOKENS_FILE')
            ),
            max_body_bytes=_positive(
                'PLANTS_MAX_BODY',
                environ.get('PLANTS_MAX_BODY', str(DEFAULT_MAX_BODY_BYTES)),
            ),
            log_format=_one_of('PLANTS_LOG', environ.get('PLANTS_LOG'), 'text', 'json'),
            metrics=_metrics(environ.get('PLANTS_METRICS')),
            cors_origins=_cors_origins(environ.get('PLANTS_CORS_ORIGINS')),
        )


def _check_names(environ: Mapping[str, str]) -> None:
    """Refuse a misspelt variable, which would be ignored otherwise."""
    for name in environ:
        if name.startswith('PLANTS_') and name not in VARIABLES:
            (nearest,) = get_close_matches(name, VARIABLES, 1, cutoff=0)
            raise ValueError(
                f'{name}: there is no such setting; the nearest one is {nearest}'
            )


def _store_url(url: str) -> str:
    try:
        check_url(url)
    except ValueError as ex:
        raise ValueError(f'PLANTS_STORE: {ex}') from ex
    except ImportError as ex:
        raise ValueError(f'PLANTS_STORE: a package is missing: {ex}') from ex
    return url


def _positive(variable: str, text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,17}', text):
        raise ValueError(f'{variable}: {text!r} is not a positive number of bytes')
    return int(text)


def _one_of(variable: str, value: str | None, default: str, other: str) -> str:
    if value is None:
        return default
    if value not in (default, other):
        raise ValueError(f'{variable}: {value!r} is not {default} or {other}')
    return value


def _metrics(value: str | None) -> bool:
    metrics = _one_of('PLANTS_METRICS', value, '0', '1') == '1'
    if metrics and find_spec('prometheus_client') is None:
        raise ValueError(
            'PLANTS_METRICS: it needs the package prometheus_client, '
            'which is not installed'
        )
    return metrics


def _cors_origins(listed: str | None) -> tuple[str, ...]:
    if listed is None:
        return ()
    origins = tuple(map(str.strip, listed.split(',')))
    try:
        check_origins(origins)
    except ValueError as ex:
        raise ValueError(f'PLANTS_CORS_ORIGINS: {ex}') from ex
    return origins


def _tokens(listed: str | None, path: str | None) -> Tokens | None:
    if listed is not None and path is not None:
        raise ValueError('PLANTS_TOKENS and PLANTS_TOKENS_FILE are both set: use one')
    if path is not None:
        try:
            return TokensFile(Path(path))
        except OSError as ex:
            raise ValueError(f'PLANTS_TOKENS_FILE: {path}: {ex.strerror}') from ex
        except ValueError as ex:
            raise ValueError(f'PLANTS_TOKENS_FILE: {path}: {ex}') from ex
    if listed is not None:
        try:
            return Tokens.of(filter(None, map(str.strip, listed.split(','))))
        except ValueError as ex:
            raise ValueError(f'PLANTS_TOKENS: {ex}') from ex
    return None
