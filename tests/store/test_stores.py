"""The stores keep the contract."""

from contextlib import contextmanager, suppress

import pytest
from contract import StoreContract
from disk import raw_plants
from psycopg.errors import UndefinedTable

from store import Plant, open_store
from store.jsonl import JSONLinesStore


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with open_store('memory:') as store:
            yield store

    def raw_plants(self, store):
        return list(store._plants.values())


class TestJSONLinesStore(StoreContract):
    @pytest.fixture
    def store(self, path):
        with JSONLinesStore(path) as store:
            yield store

    def raw_plants(self, store):
        return raw_plants(store.path.read_bytes()) if store.path.exists() else []

    def url(self, store):
        return f'jsonl:{store.path}'

    @contextmanager
    def unavailable(self, store):
        away = store.path.rename(store.path.with_name('away'))
        yield
        away.rename(store.path)


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
