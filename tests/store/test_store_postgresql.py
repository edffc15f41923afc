"""The store in a PostgreSQL database, against a real server."""

import os
import shutil
from contextlib import ExitStack, contextmanager, suppress

import pytest
from postgresql import PACKAGE, PostgreSQL, programs, run
from psycopg.errors import UndefinedTable

from store import Plant, StoreUnavailable, open_store
from store.postgresql import limits
from store.testing import PATIENCE, StoreContract


class TestPostgreSQLStore(StoreContract):
    @pytest.fixture
    def store(self, url):
        with open_store(url) as store:
            yield store

    def raw_plants(self, store):
        try:
            rows = self.server.execute('TABLE plants', url=store._url)
        except UndefinedTable:  # the store was not used yet
            rows = []
        return [Plant(*row) for row in rows]

    @pytest.fixture(autouse=True)
    def _with_server(self, server):
        self.server = server

    def url(self, store):
        return store._url

    @contextmanager
    def unavailable(self, store):
        self.server.execute('ALTER TABLE plants RENAME TO shrubs', url=store._url)
        yield
        self.server.execute('ALTER TABLE shrubs RENAME TO plants', url=store._url)


def test_reading_makes_no_table(url):
    """Reading a store without a table finds nothing, and makes no table."""
    with open_store(url) as store:
        assert list(store) == []
    with (
        open_store(url, create='never') as store,
        pytest.raises(StoreUnavailable, match='there is no table plants'),
    ):
        list(store)


def test_check_opening_makes_no_table(url, server):
    """check_opening accepts a missing table that can be made, and does not make it."""
    with open_store(url, create='never') as store:
        store.check_opening()
        with pytest.raises(StoreUnavailable):
            list(store)
    elsewhere = url.replace('/postgres?', '/nowhere?')
    with (
        open_store(elsewhere, create='never') as store,
        pytest.raises(StoreUnavailable, match='nowhere'),
    ):
        store.check_opening()


def test_standby_is_read():
    """Plants can be read from a standby, which is not ready for adds."""
    with PostgreSQL() as primary:
        with open_store(primary.url()) as store:
            store.add(Plant(1, 'Fern'))
        with (
            PostgreSQL(primary) as standby,
            open_store(standby.url(), create='never') as store,
        ):
            assert list(store) == [Plant(1, 'Fern')]
            with pytest.raises(StoreUnavailable):
                store.ping()


def test_exhausted_pool_is_no_outage(url, monkeypatch):
    """An exhausted pool neither starts nor ends an outage of the database."""
    monkeypatch.setattr(limits, 'CONNECT_WITHIN', 0.01)
    monkeypatch.setattr(limits, 'RETRY_AFTER', 0)
    with open_store(url) as store:
        database = store._backend()

        @contextmanager
        def exhausted():
            with ExitStack() as lent:
                for _ in range(limits.MOST_CONNECTIONS):
                    lent.enter_context(database._pool.lend())
                yield

        with exhausted(), pytest.raises(StoreUnavailable, match='are in use'):
            store.ping()
        store.ping()
        with suppress(StoreUnavailable), database._outage.watch():
            raise StoreUnavailable('it is away')
        monkeypatch.setattr(limits, 'RETRY_AFTER', PATIENCE)
        with exhausted(), pytest.raises(StoreUnavailable, match='are in use'):
            store.ping()
        with pytest.raises(StoreUnavailable, match='it is away'):
            store.ping()


@pytest.mark.skipif(
    os.getuid() != 0, reason='only root runs the server as another user'
)
def test_server_of_the_tests_runs_from_a_private_directory(tmp_path):
    """Root may run the tests in a checkout that no other user may enter."""
    private = tmp_path / 'private'
    private.mkdir(mode=0o700)
    for package in (PACKAGE, PACKAGE.with_name(f'{PACKAGE.name}.libs')):
        shutil.copytree(package, private / package.name)
    found = programs(private / PACKAGE.name)
    assert private not in found.parents
    assert 'PostgreSQL' in run(found / 'postgres', '--version').stdout
