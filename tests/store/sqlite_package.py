"""Example of a store from another package: plants in an SQLite table."""

import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path

from store import (
    IdTaken,
    Plant,
    PlantStore,
    StoreClosed,
    StoreUnavailable,
    check_plant,
)

TABLE = 'CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name, tag)'


class SQLiteStore(PlantStore):
    """Keep plants in an SQLite file; durable against a process crash only."""

    def __init__(self, url, *, create, scheduler):
        self.url, self._create, self._closed = url, create, False
        self.path = Path(url.partition(':')[2]).absolute()
        if self.path.is_dir():
            raise ValueError('the path is a directory, not a database file')

    @contextmanager
    def _database(self):
        if self._closed:
            raise StoreClosed
        mode = 'rw' if self._create == 'never' else 'rwc'
        address = f'{self.path.as_uri()}?mode={mode}'
        try:
            with (
                closing(sqlite3.connect(address, timeout=20, uri=True)) as database,
                database,
            ):
                database.execute('PRAGMA synchronous = OFF')
                database.execute(TABLE)
                yield database
        except sqlite3.Error as ex:
            raise StoreUnavailable(str(ex), store=str(self.path)) from ex

    def add(self, plant):
        check_plant(plant)
        with self._database() as database:
            insert = 'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING'
            is_new = database.execute(insert, plant).rowcount == 1
            row = 'SELECT * FROM plants WHERE id = ?'
            if Plant(*database.execute(row, [plant.id]).fetchone()) != plant:
                raise IdTaken(plant.id)
            return is_new

    def __iter__(self):
        with self._database() as database:
            rows = database.execute('SELECT * FROM plants').fetchall()
        return iter([Plant(*row) for row in rows])

    def ping(self):
        with self._database():
            pass

    def close(self):
        self._closed = True
