"""The store in a PostgreSQL database, against a real server."""

import os
import shutil
import threading
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import suppress

import pytest
from postgresql import PACKAGE
from postgresql import PostgreSQL
from postgresql import programs
from postgresql import run
from psycopg.errors import UndefinedTable

from store import Plant
from store import StoreClosed
from store import StoreUnavailable
from store import open_store
from store.postgresql import limits
from store.testing import PATIENCE
from store.testing import StoreContract
from store.testing import wait_until


class TestPostgreSQLStore(StoreContract):
    @pytest.fixture
    def store(self, url):
        with open_store(url) as store:
            yield store

    def raw_plants(self, store):
        try:
            rows = self.server.execute('TABLE plants', url=store._url)
        except UndefinedTable:  # it was not used yet
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


def test_nothing_yet(url):
    """To read what is not there yet makes no table, and finds nothing."""
    with open_store(url) as store:
        assert list(store) == []
    with (
        open_store(url, create='never') as store,
        pytest.raises(StoreUnavailable, match='there is no table plants'),
    ):
        list(store)


def test_check_opening(url, server):
    """A start would work where the table can be made; a check does not make it."""
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
    with open_store(elsewhere) as store:
        assert store.size_hint() == 0


def test_standby_is_read():
    """Plants are read from a server that takes none."""
    with PostgreSQL() as primary:
        with open_store(primary.url()) as store:
            store.add(Plant(1, 'Fern'))
        with (
            PostgreSQL(primary) as standby,
            open_store(standby.url(), create='never') as store,
        ):
            assert list(store) == [Plant(1, 'Fern')]
            assert store.size_hint() == 1
            with pytest.raises(StoreUnavailable):
                store.ping()


def test_no_connection_is_free(url, monkeypatch):
    """That no connection is free is no sign that the database is away, or is back."""
    monkeypatch.setattr(limits, 'CONNECT_WITHIN', 0.01)
    monkeypatch.setattr(limits, 'RETRY_AFTER', PATIENCE)
    with open_store(url) as store:
        database = store._backend()

        def find_none():
            with ExitStack() as lent:
                for _ in range(limits.MOST_CONNECTIONS):
                    lent.enter_context(database._pool.lend())
                with pytest.raises(StoreUnavailable, match='are in use'):
                    store.ping()

        find_none()
        store.ping()
        with monkeypatch.context() as patch, suppress(StoreUnavailable):
            patch.setattr(limits, 'RETRY_AFTER', 0)
            with database._outage.watch():
                raise StoreUnavailable('it is away')
        find_none()
        with pytest.raises(StoreUnavailable, match='it is away'):
            store.ping()


def test_close_ends_the_wait_for_a_connection(url, monkeypatch):
    """Whoever waits for a connection when the store is closed learns that."""
    monkeypatch.setattr(limits, 'CONNECT_WITHIN', PATIENCE)
    with open_store(url) as store:
        database = store._backend()
        refused = []

        def wait():
            with pytest.raises(StoreClosed):
                database.ping()
            refused.append(True)

        with ExitStack() as lent:
            for _ in range(limits.MOST_CONNECTIONS):
                lent.enter_context(database._pool.lend())
            waiting = threading.Thread(target=wait)
            waiting.start()
            wait_until(lambda: database._pool._changed._waiters)
            database._pool.close()
            waiting.join()
        assert refused


@pytest.mark.skipif(os.getuid() != 0, reason='only root has another user for it')
def test_server_of_the_tests_runs_from_a_private_directory(tmp_path):
    """Root runs these tests in a checkout that no other user may enter."""
    private = tmp_path / 'private'
    private.mkdir(mode=0o700)
    for package in (PACKAGE, PACKAGE.with_name(f'{PACKAGE.name}.libs')):
        shutil.copytree(package, private / package.name)
    found = programs(private / PACKAGE.name)
    assert private not in found.parents
    assert 'PostgreSQL' in run(found / 'postgres', '--version').stdout
