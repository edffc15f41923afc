"""The file store keeps the contract of stores."""

import contextlib

import pytest
from contract import StoreContract
from disk import raw_plants

from store.jsonl import JSONLinesStore


class TestJSONLinesStore(StoreContract):
    @pytest.fixture
    def store(self, path):
        with JSONLinesStore(path) as store:
            yield store

    def raw_plants(self, store):
        return raw_plants(store.path.read_bytes()) if store.path.exists() else []

    def url(self, store):
        return f'jsonl:{store.path}'

    @contextlib.contextmanager
    def unavailable(self, store):
        away = store.path.rename(store.path.with_name('away'))
        yield
        away.rename(store.path)
