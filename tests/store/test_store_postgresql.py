"""The store in a PostgreSQL database, against a real server."""

from contextlib import contextmanager, suppress

import pytest
from contract import StoreContract
from psycopg.errors import UndefinedTable

from store import Plant, open_store


class TestPostgreSQLStore(StoreContract):
    @pytest.fixture
    def store(self, url, database):
        self.database, self.store_url = database, url
        with open_store(url) as store:
            yield store

    def raw_plants(self, store):
        rows = []
        with suppress(UndefinedTable):  # the store was not used yet
            rows = self.database.execute('TABLE plants', url=self.store_url)
        return [Plant(*row) for row in rows]

    def url(self, store):
        return self.store_url

    @contextmanager
    def unavailable(self, store):
        rename = 'ALTER TABLE {} RENAME TO {}'
        self.database.execute(rename.format('plants', 'shrubs'), url=self.store_url)
        yield
        self.database.execute(rename.format('shrubs', 'plants'), url=self.store_url)
