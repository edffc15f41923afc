"""The settings of the service: the only reader of the ``PLANTS_`` variables."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from store import DEFAULT_URL, open_store
from store.jsonl.record import LONGEST
from web.middleware import CrossOrigin
from web.tokens import Tokens, TokensFile

_NAMES = 'STORE TOKENS TOKENS_FILE MAX_BODY LOG METRICS_TOKEN CORS_ORIGINS'
VARIABLES = [f'PLANTS_{name}' for name in _NAMES.split()]


def is_set(environ: Mapping[str, str], name: str, text: str) -> bool:
    """Whether a variable has a value, asked before a bad one can be reported."""
    return environ.get(name, '').strip() == text


@dataclass(frozen=True)
class Settings:
    """What the environment configures."""

    store: str = field(default=DEFAULT_URL, repr=False)  # it may have a password
    tokens: Tokens | None = None  # None: no token is configured
    max_body_bytes: int = 65_536
    metrics_token: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()  # whose pages may read answers; * means all

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables; a ``ValueError`` has a line for each that is wrong."""
        fields: dict[str, Any] = {}
        faults = []
        if environ.keys() >= {'PLANTS_TOKENS', 'PLANTS_TOKENS_FILE'}:
            faults.append('PLANTS_TOKENS and PLANTS_TOKENS_FILE are both set: use one')
        for name, text in sorted({'PLANTS_STORE': DEFAULT_URL, **environ}.items()):
            try:
                fields |= _read(name, text.strip())
            except ValueError as ex:
                faults.append(f'{name}: {ex}')
        if faults:
            raise ValueError('\n'.join(faults))
        return cls(**fields)


def _read(name: str, text: str) -> dict[str, Any]:
    """Return the fields that a variable sets; a ``ValueError`` if it is wrong."""
    match name:
        case 'PLANTS_STORE':
            # Opens no file. The code is imported now: --user may be unable to read it.
            open_store(text, create=False)
            return {'store': text}
        case 'PLANTS_TOKENS':
            return {'tokens': Tokens(filter(None, map(str.strip, text.split(','))))}
        case 'PLANTS_TOKENS_FILE':
            return {'tokens': TokensFile(Path(text))}
        case 'PLANTS_MAX_BODY':
            if not re.fullmatch('[1-9][0-9]{0,17}', text) or int(text) > LONGEST:
                raise ValueError(f'{text!r} is not a number of bytes up to {LONGEST}')
            return {'max_body_bytes': int(text)}
        case 'PLANTS_LOG':  # see serving/log.py
            if text not in ('text', 'json'):
                raise ValueError(f'{text!r} is not text or json')
        case 'PLANTS_METRICS_TOKEN':
            Tokens(text)
            if find_spec('prometheus_client') is None:
                raise ValueError('it needs the package prometheus-client')
            return {'metrics_token': text}
        case 'PLANTS_CORS_ORIGINS':
            origins = tuple(map(str.strip, text.split(',')))
            CrossOrigin(origins)
            return {'cors_origins': origins}
        case _ if name.startswith('PLANTS_'):
            # No fault: Kubernetes sets PLANTS_PORT for a service named plants.
            [nearest] = get_close_matches(name, VARIABLES, 1, cutoff=0)
            warning = '%s: no such setting; the nearest one is %s'
            logging.getLogger('plants').warning(warning, name, nearest)
    return {}
