"""The store in a PostgreSQL database, against a real server."""

from contextlib import contextmanager, suppress

import pytest
from contract import StoreContract
from psycopg.errors import UndefinedTable

from store import Plant, open_store


class TestPostgreSQLStore(StoreContract):
    @pytest.fixture
    def store(self, url, database):
        self.database = database
        with open_store(url) as store:
            yield store

    def raw_plants(self, store):
        rows = []
        with suppress(UndefinedTable):  # the store was not used yet
            rows = self.database.execute('TABLE plants', url=store._url)
        return [Plant(*row) for row in rows]

    def url(self, store):
        return store._url

    @contextmanager
    def unavailable(self, store):
        self.database.execute('ALTER TABLE plants RENAME TO shrubs', url=store._url)
        yield
        self.database.execute('ALTER TABLE shrubs RENAME TO plants', url=store._url)
