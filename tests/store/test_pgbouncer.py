"""The PostgreSQL store behind PgBouncer, whose clients share sessions."""

import psycopg
import pytest
from contract import samples
from disk import assert_raise
from postgresql import PgBouncer, refused
from test_postgresql_faults import (  # noqa: F401
    can_add,
    far,
    proxy,
    short_limits,
    store,
    test_cancelled_commit_is_not_acknowledged,
    test_each_id_has_one_winner_while_sessions_end,
    test_locked_row_delays_no_other_add,
    test_lost_response_is_asked_for_once_more,
    test_lost_response_is_unavailable,
    test_nothing_is_acknowledged_without_the_standby,
    test_ping_waits_for_the_standby,
)
from test_store_postgresql import TestPostgreSQLStore as DirectContract
from waiting import in_threads, wait_until

from store import Plant, StoreUnavailable, open_store
from store.postgresql import connection

FERN = Plant(1, 'Fern')
FULL = 'the connection pool of the database is full, or does not reach the database'

# Of the role. The store would lose plants with them, or wait for long.
WRONG = {
    'array_nulls': 'off',
    'default_transaction_isolation': 'serializable',
    'lock_timeout': '0',
    'statement_timeout': '0',
    'synchronous_commit': 'off',
}


@pytest.fixture(scope='module')
def pooler(database):
    """A pooler in transaction mode."""
    with PgBouncer(database, 'transaction', size=3) as pooler:
        yield pooler


@pytest.fixture
def url(pooler):
    """The URL of an empty store."""
    return pooler.new_url(**WRONG)


@pytest.fixture(scope='module')
def narrow(database):
    """A pooler whose clients all share one session."""
    with PgBouncer(database, 'transaction') as pooler:
        yield pooler


def few_samples():
    """Return one plant with a large text: the pooler only passes them on."""
    small = [p for p in samples() if len(p.name) + len(p.tag or '') < 2**15]
    return [*small, Plant(9000, '"\U0001f331' * 2**19)]


class TestPgBouncer(DirectContract):
    @pytest.fixture
    def store(self, narrow, database, monkeypatch):
        self.database = database
        monkeypatch.setattr('contract.samples', few_samples)
        with open_store(narrow.new_url(**WRONG)) as opened:
            yield opened


WITNESS = """
CREATE TABLE seen (settings text);
CREATE FUNCTION see() RETURNS trigger AS $$BEGIN INSERT INTO seen SELECT
concat_ws(' ', current_setting('synchronous_commit'), current_setting('lock_timeout'),
current_setting('statement_timeout'), current_setting('transaction_isolation'));
RETURN NEW; END$$ LANGUAGE plpgsql;
CREATE TRIGGER see BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION see()
"""


def test_settings_belong_to_the_transaction(database, url, store):  # noqa: F811
    """Each plant is committed with the settings that must hold; none is left behind."""
    database.execute(WITNESS, url=url)

    def add_all(start):
        for id in range(start, start + 20):
            for new in True, False:
                assert store.add(Plant(id, 'Fern')) is new

    in_threads(*(lambda at=at: add_all(100 * at) for at in range(8)))
    seen = 'SELECT settings, count(*) FROM seen GROUP BY 1'
    assert database.execute(seen, url=url) == [('on 300ms 3s read committed', 8 * 40)]
    with psycopg.connect(url, autocommit=True) as other:
        left = other.execute('SHOW lock_timeout').fetchone()
        assert left == (WRONG['lock_timeout'],)


@pytest.mark.parametrize(
    ('mode', 'options', 'reason'),
    [
        ('statement', '', 'the connection pooler is in statement mode'),
        ('session', '?options=-cx%3Dy', 'the connection pooler does not accept'),
    ],
)
def test_pooler_that_cannot_do_is_refused(database, mode, options, reason):
    """A pooler is refused with its reason if it ends sessions in a transaction."""
    with (
        PgBouncer(database, mode) as pooler,
        open_store(pooler.new_url() + options) as opened,
    ):
        uses = opened.ping, opened.check_opening, lambda: opened.add(FERN)
        assert_raise(StoreUnavailable, *uses, match=reason)


def test_pool_is_not_full_because_it_was(database, url, far, proxy, monkeypatch):  # noqa: F811
    """A connection that is lost after a cancelled statement tells of no full pool."""
    monkeypatch.setattr(connection, 'ANSWER_WITHIN', 0.4)
    monkeypatch.setattr(connection, 'CANCEL_WITHIN', 3)  # a machine may be busy
    rule = 'ALTER TABLE plants ADD CHECK (pg_sleep(0.8) IS NOT NULL)'
    database.execute(rule, url=url)
    with refused('the database did not answer in time'):
        far.add(FERN)
    database.execute('ALTER TABLE plants DROP CONSTRAINT plants_check', url=url)
    wait_until(lambda: can_add(far))
    proxy.stop()
    with refused('there is no connection to the database'):
        far.add(FERN)
    proxy.go_on()


def test_full_pool_is_named(database, monkeypatch):
    """A pool of one session is enough for a store; another one says what is full."""
    monkeypatch.setattr(connection, 'CONNECT_WITHIN', 0.5)
    monkeypatch.setattr(connection, 'CANCEL_WITHIN', 0.2)
    with PgBouncer(database, 'session') as pooler:
        url = pooler.new_url()
        with open_store(url) as first, open_store(url) as other:
            in_threads(*(lambda at=at: first.add(Plant(at, 'Fern')) for at in range(8)))
            with refused(FULL):
                other.ping()
        with open_store(url) as again:
            assert len(list(again)) == 8
