"""The PostgreSQL store behind PgBouncer, whose clients share sessions."""

import psycopg
import pytest
from contract import FORK
from postgresql import pgbouncer, witness
from test_postgresql_faults import (  # noqa: F401
    store,
    test_commit_that_is_cancelled_is_not_acknowledged,
    test_sessions_that_end_lose_no_acknowledged_plant,
)
from test_stores import TestPostgreSQLStore as Contract

from store import Plant, open_store
from store.postgresql.connection import LOCK_WITHIN

# Of the database. The store would lose plants with them, or wait for long.
WRONG = {'default_transaction_isolation': 'serializable', 'synchronous_commit': 'off'}
WRONG |= {'lock_timeout': '0', 'statement_timeout': '0'}


@pytest.fixture(scope='module')
def pooler(database):
    """A pooler in transaction mode, whose clients share two sessions."""
    with pgbouncer(database, 'transaction', **WRONG) as url:
        yield url


@pytest.fixture
def url(database, pooler):
    """The URL of an empty store."""
    database.execute('DROP SCHEMA public CASCADE; CREATE SCHEMA public', url=pooler)
    return pooler


def test_adds_at_once(database, url, store):  # noqa: F811
    """Many processes share two sessions, and one table."""
    contract = Contract()
    contract.database, contract.store_url = database, url
    contract.test_adds_at_once(store, FORK.Process)


def test_settings_belong_to_the_transaction(database, url, store):  # noqa: F811
    """Each plant is committed with the settings that must hold; none is left behind."""
    settings = 'synchronous_commit', 'lock_timeout', 'transaction_isolation'
    database.execute(witness(*settings), url=url)

    assert store.add(Plant(1, 'Fern')) is True
    assert store.add(Plant(1, 'Fern')) is False
    seen = database.execute('SELECT DISTINCT seen FROM plants', url=url)
    assert seen == [(['on', f'{1000 * LOCK_WITHIN:.0f}ms', 'read committed'],)]
    with psycopg.connect(url, autocommit=True) as other:
        assert other.execute('SHOW lock_timeout').fetchone() == (WRONG['lock_timeout'],)


def test_few_sessions_are_enough(database):
    """In session mode a store keeps one session, and one more while it reads."""
    with (
        pgbouncer(database, 'session') as url,
        open_store(url) as first,
        open_store(url, create=False) as other,
    ):
        assert first.add(Plant(1, 'Fern')) is True
        assert list(first) == [Plant(1, 'Fern')]
        assert other.add(Plant(1, 'Fern')) is False
