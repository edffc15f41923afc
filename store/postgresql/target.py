"""The database and the table that a URL names."""

import re
import sys
from typing import Any
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from store.masking import masked

NAMES = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
# What a URL may change. An idle connection whose server is gone is noticed in 9 s.
DEFAULTS = {
    'fallback_application_name': 'plants',
    'keepalives_idle': 5,
    'keepalives_interval': 2,
    'keepalives_count': 2,
    'tcp_user_timeout': 5000,
    # libpq's GSSAPI ends a forked process on macOS (gunicorn issue 1701).
    **({'gssencmode': 'disable'} if sys.platform == 'darwin' else {}),
}


class Target:
    """A database, and its table once that was found: no second one is made then."""

    table = ''

    def __init__(self, url: str, create: bool) -> None:
        self.shown = masked(url)  # in errors
        self.parameters = _parse(url)
        self.create = create


def _parse(url: str) -> dict[str, Any]:
    """Return the parameters for libpq.

    Raises:
        ValueError: libpq would not accept the URL. The message shows no part of it but
            the name of a parameter.
    """
    rest = url.partition('://')[2]
    # libpq takes the rest of a password after such a character for the host or a
    # parameter, and shows it in an error. An @ in a parameter looks the same.
    if re.search('(?si)@.*@|[/?#].*@|%(?![0-9a-f]{2})', rest):
        raise ValueError(
            'percent-encode in the password: % as %25, @ %40, / %2F, ? %3F, # %23'
        )
    for pair in filter(None, rest.partition('?')[2].split('&')):
        name, _, value = pair.partition('=')
        if unquote(name) not in {*NAMES, 'ssl'}:
            # It may also be the rest of a password, after an & in it.
            is_known = re.fullmatch('[A-Za-z]\\w*', name) and 'password=' not in rest
            shown = name if is_known else 'after an &'
            raise ValueError(f'remove the parameter {shown}: libpq has none such')
        if '=' in value:
            raise ValueError(f'remove the parameter {name}, or write its = as %3D')
    try:
        parameters: dict[str, Any] = conninfo_to_dict(url)
    except psycopg.Error:
        raise ValueError('it is not a URL that libpq accepts') from None
    ports = str(parameters.get('port', ''))
    if not re.fullmatch('[0-9,]*', ports):
        raise ValueError('the port is not a number')
    hosts = max(str(parameters.get(it, '')).count(',') for it in ('host', 'hostaddr'))
    if ports.count(',') not in (0, hosts):
        raise ValueError('give one port, or one for each host')
    return DEFAULTS | parameters | {'client_encoding': 'utf8'}
