"""A database over one connection, which is opened again if it was lost."""

import re
import sys
import time
from typing import Any
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from store.masking import masked
from store.postgresql.connection import Connection
from store.postgresql.reasons import explain

PAUSE = 0.03  # seconds after an attempt to connect, which all that wait have shared
KNOWN = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
DEFAULTS: dict[str, Any] = {'fallback_application_name': 'plants'}
# An idle connection whose server is gone is noticed within 9 s.
DEFAULTS |= {'keepalives_idle': 5, 'keepalives_interval': 2, 'keepalives_count': 2}
DEFAULTS |= {'tcp_user_timeout': 5000}  # milliseconds
if sys.platform == 'darwin':  # GSSAPI ends a forked process (gunicorn issue 1701)
    DEFAULTS['gssencmode'] = 'disable'


class Target:
    """The database that a URL names."""

    table = ''  # its table, once that was found; then none is made

    def __init__(self, url: str, create: bool) -> None:
        self.shown, self.create = masked(url), create
        rest = url.partition('://')[2]
        # libpq takes the rest of a password after such a character for the host or a
        # parameter, and shows it in an error. An @ in a parameter looks the same.
        if re.search('(?si)@.*@|[/?#].*@|%(?![0-9a-f]{2})', rest):
            raise ValueError(
                'percent-encode in the password: % as %25, @ %40, / %2F, ? %3F, # %23'
            )
        for pair in filter(None, rest.partition('?')[2].split('&')):
            name = unquote(pair.partition('=')[0])
            if name not in {*KNOWN, 'ssl'} or pair.count('=') != 1:
                # It may also be the rest of a password, after an & in it.
                is_name = re.fullmatch(r'[a-z]\w*', name) and 'password=' not in rest
                shown = name if is_name or name in KNOWN else 'after &'
                raise ValueError(f'remove the parameter {shown}: libpq refuses it')
        try:
            parameters: dict[str, Any] = conninfo_to_dict(url)
        except psycopg.Error:
            raise ValueError('it is not a URL that libpq accepts') from None
        if not re.fullmatch('[0-9,]*', str(parameters.get('port', ''))):
            raise ValueError('the port is not a number')
        self.parameters = DEFAULTS | parameters | {'client_encoding': 'utf8'}
        self.secrets = f'{parameters.get("password")} {parameters.get("sslpassword")}'


class Database:
    """Executes transactions, for one thread at a time."""

    def __init__(self, target: Target, *, to_read: bool = False) -> None:
        self.target, self.to_read = target, to_read
        self._connection: Connection | None = None

    def transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements as one transaction; return the rows of all of them.

        If the server refuses, and a new connection may help, execute them once more.
        """
        if self._connection is not None and self._connection.has_ended():
            self.close()
        was_open = self._connection is not None
        while True:
            connection = self._connection or self._connect()
            try:
                return connection.transact(statements, *values, begin=begin)
            except psycopg.Error as ex:
                error = explain(ex, self.target.shown, self.target.secrets)
                if error.retry != 'connect' or connection.closed or not was_open:
                    raise error from None  # NOTE: psycopg's error shows DETAIL
                was_open, connection.is_spent = False, True
            finally:
                if connection.is_spent or connection.closed:
                    self.close()

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self) -> Connection:
        try:
            self._connection = Connection.open(self.target.parameters, self.to_read)
        except psycopg.Error as ex:
            time.sleep(PAUSE)
            raise explain(ex, self.target.shown, self.target.secrets) from None
        return self._connection
