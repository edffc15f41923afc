"""What the errors of a PostgreSQL server mean to a client."""

from __future__ import annotations

import psycopg
from psycopg import errors

from store.errors import StoreUnavailable

# The batch may be tried again.
CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected)
# The table has rules of its own, and a plant breaks one; the other plants of its batch
# may keep them. The last two are a text too long for an index, and a trigger.
RULES = (
    errors.DataError,
    errors.IntegrityError,
    errors.WithCheckOptionViolation,
    errors.ProgramLimitExceeded,
    errors.RaiseException,
)

RULE = 'a rule of the table plants does not permit it'
# By SQLSTATE or its class. A client sees these words; the log has the server's, too.
REASONS = {
    None: 'there is no connection to the database',
    '22': RULE,
    '23': RULE,
    '25': 'the database is read-only',
    '40': 'the database is busy with other changes of the same plants',
    '40003': 'the database does not say whether the plant is safe',
    '42': 'the database does not permit it',
    '42P01': 'there is no table plants',
    '44': RULE,
    '53': 'the database is out of room',
    '54': RULE,
    '55P03': 'another session has locked the plant',
    '57': 'the database is going down or coming up',
    '57014': 'the database did not answer in time',
    'P0': RULE,
}


class PlantLocked(StoreUnavailable):
    """Somebody else's transaction has locked the row or the id of a plant."""


def refusal(error: psycopg.Error, store: str) -> StoreUnavailable:
    """Return the exception of a store for an error of the server."""
    code = error.sqlstate
    reason = REASONS.get(code) or REASONS.get(code and code[:2])
    locked = isinstance(error, errors.LockNotAvailable)
    return (PlantLocked if locked else StoreUnavailable)(
        reason or f'the database refuses it ({code})',
        store=store,
        detail=' '.join(str(error).split()),
    )
