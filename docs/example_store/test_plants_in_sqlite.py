"""The tests that every store must pass, with what they must know of this one."""

import sqlite3
from contextlib import closing, contextmanager

import pytest

from store import Plant, StoreUnavailable, open_store

# Before the import: pytest then shows the values in an assertion that fails.
pytest.register_assert_rewrite('contract')

from contract import StoreContract  # noqa: E402  a copy of tests/store/contract.py


class TestSQLiteStore(StoreContract):
    """An SQLite store keeps the contract."""

    @pytest.fixture
    def store(self, tmp_path):
        """An empty store that was not used yet."""
        with open_store(f'sqlite:{tmp_path}/plants.db') as store:
            yield store

    def raw_plants(self, store):
        """Return what is stored, without the code of the store."""
        if not store.path.exists():
            return []
        with closing(sqlite3.connect(store.path)) as database:
            rows = database.execute('SELECT * FROM plants')
            return [Plant(*row) for row in rows]

    def url(self, store):
        """Return the URL, for the tests that open the store again."""
        return store.url

    @contextmanager
    def unavailable(self, store):
        """Keep the store from working for a moment."""
        kept = store.path.read_bytes()
        store.path.write_bytes(b'not a database ' * 1000)
        yield
        store.path.write_bytes(kept)

    def test_lost_file_is_not_made_again(self, store):
        """A new one would give its ids again."""
        store.add(Plant(1, 'Fern'))
        store.path.unlink()
        with pytest.raises(StoreUnavailable):
            store.add(Plant(1, 'Rose'))
        assert not store.path.exists()
