"""The stores keep the contract."""

from contextlib import contextmanager, suppress
from functools import partial

import gevent
import pytest
from contract import StoreContract
from disk import raw_plants
from greenlet import getcurrent
from psycopg.errors import UndefinedTable

from serving.scheduler import GeventScheduler
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


class Greenlets(TestJSONLinesStore):
    scheduler = GeventScheduler()


@pytest.mark.parametrize('use', ['add', 'add_many', 'ping', 'close'])
def test_greenlet_may_be_interrupted(path, use):
    """10. The same where the callers are greenlets."""
    with JSONLinesStore(path, scheduler=Greenlets.scheduler) as store:
        test = partial(Greenlets().test_caller_may_be_interrupted, store, use)
        gevent.spawn(test, getcurrent).get()


class TestPostgreSQLStore(StoreContract):
    # Of a caller the code is that of the file store: it never meets the database.
    test_caller_may_be_interrupted = None

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
