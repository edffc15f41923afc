"""What an error of the database means: for the client, and for what is tried again."""

import re

import psycopg

from store.errors import StoreUnavailable
from store.masking import clean

# SQLSTATE or its class (the longer one counts) or our word; what is tried again (each
# plant alone, the batch, the statement over a new connection); the reason.
TABLE = """
08              -       there is no connection to the database
0A              connect the table plants is not as the store needs it
22,23,44,54,P0  each    a rule of the table plants does not permit it
25006           connect the database is read-only
26,42P05        connect a connection pooler mixes up sessions
28,3D           -       the database refuses the login
40              batch   the database is busy with other changes of the same plants
42,55           each    the table plants is not as the store needs it
42501           each    the database does not permit it
42P01           each    there is no table plants
53              -       the database is out of room
53300           -       the database allows no more connections
55P03           each    another session has locked the plant
57              -       the database is shutting down or starting up
57014           -       the database did not answer in time
other           each    the database refuses it ({})
altered         each    the table plants changes what is added
hosts           -       no host takes plants
locked          -       another session has locked the table plants
sync            -       a synchronous standby of the database does not confirm commits
unfit           -       the database is not as the store needs it
path            -       the search_path does not lead to one table plants
"""
ROWS = [line.split(None, 2) for line in TABLE.strip().splitlines()]
MEANINGS = {code: row for codes, *row in ROWS for code in codes.split(',')}

# The words, without SQLSTATE, for a connection that cannot be made. The first counts.
WORDS = {
    'too many c|more connections|connections exceeded|connection slots': '53300',
    'the database system is|shutting down': '57',
    'read-only|hot standby|recovery': '25006',
    'not (currently|exist)|authen|passw|pg_hba|permi|no such|support SSL|certif': '28',
}


class Fault(psycopg.OperationalError):
    """A fault that the store itself finds; its code has a row of the table."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.sqlstate = code


class Unavailable(StoreUnavailable):
    """The database refuses; ``retry`` is that of the table."""

    def __init__(self, code: str, store: str, detail: str = '') -> None:
        row = MEANINGS.get(code) or MEANINGS.get(code[:2], MEANINGS['other'])
        self.code, (self.retry, reason) = code, row
        super().__init__(reason.format(code), store=store, detail=detail)
        self.full = str(self)  # for the log, which then tells the detail once


def meaning(error: psycopg.Error) -> str:
    """Return the code of an error: its SQLSTATE, or one of our words."""
    code, diag = error.sqlstate or '08', error.diag
    if code == '08P01' or not error.sqlstate:  # PgBouncer knows only that SQLSTATE
        return next((WORDS[it] for it in WORDS if re.search(it, str(error))), '08')
    if code == '55P03' and not diag.context:  # it would name a row
        return 'locked'
    if code[:2] == '42' and diag.context:  # of a trigger
        return '42'
    return code


def explain(error: psycopg.Error, store: str, secrets: str = '') -> Unavailable:
    """Return what an error means, without DETAIL and CONTEXT, which name plants."""
    diag, words = error.diag, str(error)
    if diag.message_primary:
        named = diag.table_name, diag.column_name, diag.constraint_name
        where = ', '.join([f'SQLSTATE {error.sqlstate}', *filter(None, named)])
        words = f'{diag.message_primary} ({where})'
    # NOTE: without a scheme, so that all of it is hidden.
    return Unavailable(meaning(error), store, clean(words, f'@ {secrets}'))
