"""The store in a PostgreSQL database, against a real server."""

from contextlib import contextmanager

import pytest
from postgresql import PostgreSQL
from psycopg.errors import UndefinedTable

from store import Plant, StoreUnavailable, open_store
from store.testing import StoreContract


class TestPostgreSQLStore(StoreContract):
    @pytest.fixture
    def store(self, url, server):
        self.server = server
        with open_store(url) as store:
            yield store

    def raw_plants(self, store):
        try:
            rows = self.server.execute('TABLE plants', url=store._url)
        except UndefinedTable:  # the store was not used yet
            rows = []
        return [Plant(*row) for row in rows]

    def url(self, store):
        return store._url

    @contextmanager
    def unavailable(self, store):
        self.server.execute('ALTER TABLE plants RENAME TO shrubs', url=store._url)
        yield
        self.server.execute('ALTER TABLE shrubs RENAME TO plants', url=store._url)


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
