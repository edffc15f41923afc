"""What an error of the database means: one table for adds, probes and connections."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from store.base import Plant
from store.errors import StoreUnavailable
from store.masking import clean

# 1. SQLSTATE or its class (PostgreSQL, appendix A; the longer one counts), or our word.
# 2. What is tried again within the deadline: each plant of the batch alone, the whole
# batch, or the call over a new connection, once. 3. When a failed probe shows that no
# add works: always (down), or only if it copied a stored plant (copy). 4. The reason.
TABLE = """
08              connect down there is no connection to the database
0A,42,55        each    down the table plants is not as the store needs it
22,23,44,54,P0  each    copy a rule of the table plants does not permit it
25,58           -       down the database refuses it ({})
25006           connect down the database is read-only
26,42P05        -       down a connection pooler has mixed up sessions
28              -       down the database refuses the login
3D              -       down there is no such database
3F              -       down the search_path leads to no schema
40              batch   down the database is busy with other changes of the same plants
40003           -       down the database does not say whether the plant is safe
42501           each    copy the database does not permit it
42P01           each    down there is no table plants
53              -       down the database is out of room
53300           -       down the database allows no more connections
55P03           each    copy another session has locked the plant
57              connect down the database is shutting down or starting up
57014           -       down the database did not answer in time
other           each    copy the database refuses it ({})
altered         -       down the table plants changes what is added
closed          -       down the database accepts no connections
elsewhere       -       down the search_path does not lead to the table
function        each    copy a trigger of the table plants fails
hides           -       down a policy of the table plants hides plants
hosts           -       down no host takes plants
part            each    copy the table plants has no partition for the plant
locked          -       down another session has locked the table plants
primary         connect down the primary is read-only
standby         connect down the database is a standby (read-only)
sync            -       down a synchronous standby of the database does not confirm commits
two             -       down the search_path leads to two tables plants
clients         -       down the connection pooler allows no more connections
mode            -       down the connection pooler is in statement mode, not transaction
parameter       -       down the connection pooler does not accept a parameter of the URL
pool            -       down the connection pool of the database is full, or does not reach the database
"""  # noqa: E501
ROWS = [line.split(None, 3) for line in TABLE.strip().splitlines()]
MEANINGS = {code: row for codes, *row in ROWS for code in codes.split(',')}

# The words of the server, libpq or PgBouncer for errors without SQLSTATE.
WORDS = {
    'query_wait_timeout': 'pool',
    'no more connections allowed': 'clients',
    'startup parameter': 'parameter',
    'statement pooling': 'mode',
    'too many c|remaining connection slots': '53300',
    'not currently accepting connections': 'closed',
    'the database system is': '57',
    'database ".*" does not exist|no such database': '3D',
    'SSL (SYSCALL|connection has|error: unexpected eof)': '08',  # it was lost
    'authentication|password|pg_hba|permi|role ".*" does not exist|SSL|certif': '28',
}


class Fault(psycopg.OperationalError):
    """A fault that the store itself finds; its code has a row of the table."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.sqlstate = code


class Unavailable(StoreUnavailable):
    """The database refuses: ``retry`` and ``readiness`` are those of the table."""

    def __init__(self, code: str, store: str, detail: str = '') -> None:
        row = MEANINGS.get(code) or MEANINGS.get(code[:2], MEANINGS['other'])
        self.code, (self.retry, self.readiness, reason) = code, row
        super().__init__(reason.format(code), store=store, detail=detail)

    def again(self) -> 'Unavailable':
        """Return this error without the detail, which the log has already."""
        return Unavailable(self.code, self.store)


def explain(error: psycopg.Error, shown: str = '', url: str = '') -> Unavailable:
    """Return what an error means, without DETAIL and CONTEXT, which name plants."""
    code, diag = error.sqlstate or '08', error.diag
    if isinstance(error, Fault):
        url = ''  # its own words name hosts
    elif code.startswith('08'):
        code = next((WORDS[it] for it in WORDS if re.search(it, str(error))), code)
    elif code == '23502' and diag.column_name not in Plant._fields:
        code = '42'  # no plant has a value for it
    elif code == '23514' and not diag.constraint_name:
        code = 'part'
    elif code.startswith('42') and diag.context:  # our statements are in no function
        code = 'function'
    elif code == '55P03' and not diag.context:  # it names a row
        code = 'locked'
    words = clean(str(error).rpartition(' failed: ')[2], url)  # what follows the host
    if diag.message_primary:
        names = ('schema', 'table', 'column', 'constraint')
        found = [
            f'{it} {name}' for it in names if (name := getattr(diag, f'{it}_name'))
        ]
        where = ', '.join([f'SQLSTATE {error.sqlstate}', *found])
        words = clean(f'{diag.message_primary} ({where})')
    words = '; '.join([words, *getattr(error, '__notes__', [])])
    return Unavailable(code, shown, words)


@contextmanager
def explained(shown: str, url: str) -> Iterator[None]:
    """Turn errors of psycopg into ``Unavailable`` for the store of this name."""
    try:
        yield
    except psycopg.Error as ex:
        found = explain(ex, shown, url)
        # Leaves out a detail that repeats the reason. NOTE: a chain would show DETAIL.
        raise (found.again() if found.detail in found.reason else found) from None
