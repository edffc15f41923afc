"""The database that a URL names, and what its errors mean."""

import os
import re
import sys
import time
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from store import forks
from store.errors import StoreUnavailable
from store.masking import clean, masked
from store.scheduler import Scheduler

# An idle connection whose server is gone is noticed within 9 s.
DEFAULTS: dict[str, Any] = {'keepalives_idle': 5, 'keepalives_interval': 2}
DEFAULTS |= {'keepalives_count': 2, 'fallback_application_name': 'plants'}
if sys.platform == 'darwin':  # GSSAPI ends a forked process (gunicorn issue 1701)
    DEFAULTS['gssencmode'] = 'disable'
# In seconds for each address, the least that psycopg takes.
OURS: dict[str, Any] = {'client_encoding': 'utf8', 'connect_timeout': 2}
# If one cannot be read libpq goes on without a word, and perhaps without TLS.
FILES = {'sslcert': 'postgresql.crt', 'sslkey': 'postgresql.key'}
FILES |= {'sslrootcert': 'root.crt', 'sslcrl': 'root.crl'}

# What has no SQLSTATE is told by words of libpq itself: of a host that takes no plants,
# of TLS and logins, and before those of a server in any language: "FATAL:  ".
SAID = {'25006': ' is read-only', 'refused': ':  |SSL|password| auth| cert| key '}

# SQLSTATE or its class (the longer counts) or our word; what is tried again (each plant
# alone, also after a rule; the batch; the statement over a new connection); the reason.
TABLE = """
08,57           -       there is no connection to the database
0A              connect the table plants is not as the store needs it
22,23,44,54,P0  rule    a rule of the table plants does not permit it
25006           connect the database is read-only
28,refused      -       the database refuses the connection
40              batch   the database is busy with other changes of the same plants
23502,42,55     each    the table plants is not as the store needs it
42501           each    the database does not permit it
53              -       the database is out of room
55P03           each    another session has locked the plant
25P04,57014     -       the database did not answer in time
other           each    the database refuses it ({})
altered         batch   the table plants changes what is added
files           -       a certificate or key for the database cannot be read
locked          -       another session has locked the table plants
missing         -       there is no table plants
sync            -       a synchronous standby of the database does not confirm commits
path            -       the search_path does not lead to one table plants
table           -       the table plants is not as the store needs it
"""
ROWS = [line.split(None, 2) for line in TABLE.strip().splitlines()]
MEANINGS = {code: row for codes, *row in ROWS for code in codes.split(',')}


class Unavailable(StoreUnavailable):
    """The database refuses; ``retry`` is that of the table."""

    def __init__(self, code: str, store: str, detail: str = '') -> None:
        row = MEANINGS.get(code) or MEANINGS.get(code[:2], MEANINGS['other'])
        self.code, (self.retry, reason) = code, row
        super().__init__(reason.format(code), store=store, detail=detail)


class Target:
    """The hosts of a database, and its table."""

    table = ''  # its name, once that was found; then none is made

    def __init__(self, url: str, create: bool, scheduler: Scheduler) -> None:
        self.shown, self.create, self.scheduler = masked(url), create, scheduler
        rest = url.partition('://')[2]
        # libpq takes the rest of a password after such a character for the host or a
        # parameter, and shows it in an error. An @ in a parameter looks the same.
        if re.search('(?si)@.*@|[/?#].*@|%(?![0-9a-f]{2})', rest):
            raise ValueError(
                'percent-encode in the password: % as %25, @ %40, / %2F, ? %3F, # %23'
            )
        try:
            given = conninfo_to_dict(url)
        except psycopg.Error as ex:  # what it names may be the rest of a password
            words = 'a parameter' if 'password=' in rest else clean(str(ex), url)
            raise ValueError(f'correct or remove what libpq refuses: {words}') from None
        if not re.fullmatch('[0-9,]*', str(given.get('port', ''))):
            raise ValueError('the port is not a number')
        self._parameters = DEFAULTS | given | OURS
        self._secrets = f'{given.get("password")} {given.get("sslpassword")}'

    def get(self, name: str) -> Any:
        """Return a parameter, of the environment if the URL has none."""
        return self._parameters.get(name, os.environ.get(f'PG{name.upper()}'))

    def connect(self, *, to_read: bool) -> psycopg.Connection[Any]:
        """Connect to the first host that takes plants; a reader to any if none does."""
        for kind in ('read-write', 'any') if to_read else ('read-write',):
            given = self._parameters | {'target_session_attrs': kind}
            try:
                self._check_files()
                forks.fill_standard()
                return psycopg.connect(autocommit=True, **given)
            except psycopg.Error as ex:
                error = self.explain(ex)
            except (OSError, UnicodeError) as ex:  # no room, a wrong name
                code = 'files' if isinstance(ex, OSError) and ex.filename else '08'
                error = self.unavailable(code, str(ex))
        time.sleep(0.03)  # all that wait have shared this attempt
        raise error

    def _check_files(self) -> None:
        """Raise an error for a file that cannot be read, if TLS was asked for."""
        given = {name: self.get(name) for name in FILES}
        is_asked = self.get('sslmode') not in (None, 'disable') or any(given.values())
        for name, path in given.items() if is_asked else ():
            absent = () if path else (FileNotFoundError, NotADirectoryError)
            with suppress(BlockingIOError, *absent):  # libpq waits for a lease
                path = path or os.path.expanduser(f'~/.postgresql/{FILES[name]}')
                if path != 'system' and ':' not in path:  # no file has such a name
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))

    def unavailable(self, code: str, detail: str = '') -> Unavailable:
        return Unavailable(code, self.shown, detail)

    def explain(self, error: psycopg.Error) -> Unavailable:
        """Return what an error means, without DETAIL and CONTEXT, which name plants."""
        code, diag, words = error.sqlstate, error.diag, str(error)
        if not code:
            code = next((it for it in SAID if re.search(SAID[it], words)), '08')
        elif code == '55P03' and not diag.context:  # it would name a row
            code = 'locked'
        if diag.message_primary:
            words = f'{diag.message_primary} (SQLSTATE {error.sqlstate})'
        # NOTE: without a scheme, so that all of it is hidden.
        return self.unavailable(code, clean(words, f'@ {self._secrets}'))
