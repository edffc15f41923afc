"""The settings of the service: the only reader of the ``PLANTS_`` variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from store import DEFAULT_URL, open_store
from web.middleware import CrossOrigin
from web.tokens import Tokens, TokensFile

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
        'file with accepted tokens, one a line: TOKEN or NAME TOKEN, with '
        '"metrics" as a third word for a token that only reads /metrics; a changed '
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


# A server needs the answers of these two before it can report a bad setting.


def is_in_memory(environ: Mapping[str, str]) -> bool:
    """Whether each process would have plants of its own."""
    return environ.get('PLANTS_STORE') == 'memory:'


def is_json_log(environ: Mapping[str, str]) -> bool:
    """Whether the lines of the log are JSON."""
    return environ.get('PLANTS_LOG') == 'json'


@dataclass(frozen=True)
class Settings:
    """What the environment configures.

    Attributes:
        store: URL of the store.
        tokens: Which tokens are accepted; ``None`` if none is configured.
        max_body_bytes: The longest body that is read.
        metrics: Whether ``/metrics`` is served.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.
    """

    store: str
    tokens: Tokens | None
    max_body_bytes: int
    metrics: bool
    cors_origins: tuple[str, ...]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the ``PLANTS_`` variables.

        Raises:
            ValueError: One has a bad value or an unknown name, or needs a package that
                is not installed; the message is a sentence for the operator.
        """
        for name in environ:
            _check_name(name)
        store = environ.get('PLANTS_STORE', DEFAULT_URL)
        with _about('PLANTS_STORE'):
            open_store(store, create='never')  # this opens and makes nothing
        max_body = environ.get('PLANTS_MAX_BODY', str(DEFAULT_MAX_BODY_BYTES))
        with _about('PLANTS_MAX_BODY'):
            if not re.fullmatch('[1-9][0-9]{0,17}', max_body):
                raise ValueError(f'{max_body!r} is not a positive number of bytes')
        with _about('PLANTS_METRICS'):
            metrics = _one_of(environ.get('PLANTS_METRICS'), '0', '1') == '1'
            if metrics and find_spec('prometheus_client') is None:
                raise ValueError(
                    'it needs the package prometheus_client, which is not installed'
                )
        with _about('PLANTS_LOG'):
            _one_of(environ.get('PLANTS_LOG'), 'text', 'json')  # see is_json_log
        origins: tuple[str, ...] = ()
        with _about('PLANTS_CORS_ORIGINS'):
            if (listed := environ.get('PLANTS_CORS_ORIGINS')) is not None:
                origins = tuple(map(str.strip, listed.split(',')))
                CrossOrigin(origins)  # checks them
        tokens = _tokens(
            environ.get('PLANTS_TOKENS'), environ.get('PLANTS_TOKENS_FILE')
        )
        return cls(store, tokens, int(max_body), metrics, origins)


def _check_name(name: str) -> None:
    """Refuse the name of a variable that is a misspelt setting: it would be ignored.

    Other programs may have variables that begin with ``PLANT_``, so such a name is
    refused only if it lacks nothing but the S.
    """
    meant = re.sub('^PLANT_', 'PLANTS_', name)
    if name in VARIABLES or not (name.startswith('PLANTS_') or meant in VARIABLES):
        return
    (nearest,) = get_close_matches(meant, VARIABLES, 1, cutoff=0)
    advice = f'the nearest one is {nearest}'
    if re.search('PORT|HOST|BIND|ADDRESS|LISTEN|WORKER', name):
        advice = 'use the options of gunicorn: -b HOST:PORT, -w WORKERS'
    raise ValueError(f'{name}: there is no such setting; {advice}')


@contextmanager
def _about(variable: str) -> Iterator[None]:
    """Put the name of a variable in front of the message of a ``ValueError``."""
    try:
        yield
    except ValueError as ex:
        raise ValueError(f'{variable}: {ex}') from ex


def _one_of(value: str | None, default: str, other: str) -> str:
    if value not in (None, default, other):
        raise ValueError(f'{value!r} is not {default} or {other}')
    return value or default


def _tokens(listed: str | None, path: str | None) -> Tokens | None:
    if listed is not None and path is not None:
        raise ValueError('PLANTS_TOKENS and PLANTS_TOKENS_FILE are both set: use one')
    if path is not None:
        with _about('PLANTS_TOKENS_FILE'):
            return TokensFile(Path(path))
    if listed is not None:
        with _about('PLANTS_TOKENS'):
            return Tokens.of(filter(None, map(str.strip, listed.split(','))))
    return None
