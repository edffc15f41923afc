"""The PostgreSQL store behind PgBouncer, whose clients share sessions."""

import psycopg
import pytest
from postgresql import PgBouncer, witness
from test_postgresql_faults import (  # noqa: F401
    far,
    proxy,
    short_limits,
    store,
    test_commit_that_is_cancelled_is_not_acknowledged,
    test_locked_plant_delays_no_other_add,
    test_outage_loses_no_acknowledged_plant,
    test_sessions_that_end_lose_no_acknowledged_plant,
)
from test_stores import TestPostgreSQLStore  # noqa: F401

from store import Plant, open_store
from store.postgresql.connection import LOCK_WITHIN

# Of the database. The store would lose plants with them, or wait for long.
WRONG = {
    'default_transaction_isolation': 'serializable',
    'lock_timeout': '0',
    'statement_timeout': '0',
    'synchronous_commit': 'off',
}


@pytest.fixture(scope='module')
def pooler(database):
    """A pooler in transaction mode, whose clients share two sessions."""
    with PgBouncer(database, 'transaction', **WRONG) as pooler:
        yield pooler


@pytest.fixture
def url(pooler):
    """The URL of an empty store."""
    return pooler.new_url()


def test_settings_belong_to_the_transaction(database, url, store):  # noqa: F811
    """Each plant is committed with the settings that must hold; none is left behind."""
    settings = 'synchronous_commit', 'lock_timeout', 'transaction_isolation'
    database.execute(witness(*settings), url=url)

    assert store.add(Plant(1, 'Fern')) is True
    assert store.add(Plant(1, 'Fern')) is False
    seen = database.execute('SELECT DISTINCT seen FROM plants', url=url)
    assert seen == [(['on', f'{1000 * LOCK_WITHIN:.0f}ms', 'read committed'],)]
    with psycopg.connect(url, autocommit=True) as other:
        left = other.execute('SHOW lock_timeout').fetchone()
        assert left == (WRONG['lock_timeout'],)


def test_few_sessions_are_enough(database):
    """In session mode a store keeps one session, and one more while it reads."""
    with (
        PgBouncer(database, 'session') as pooler,
        open_store(pooler.new_url()) as first,
        open_store(pooler.url, create=False) as other,
    ):
        assert first.add(Plant(1, 'Fern')) is True
        assert list(first) == [Plant(1, 'Fern')]
        assert other.add(Plant(1, 'Fern')) is False
