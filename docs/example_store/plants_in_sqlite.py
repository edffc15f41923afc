"""A store of plants in another package: a table in an SQLite file."""

import os
import sqlite3
from contextlib import closing, contextmanager
from functools import partial
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
    """Keep plants in an SQLite file; they outlive a power cut.

    Each call opens the file. So nothing is open at a fork, and threads share nothing.

    Args:
        url: ``sqlite:PATH``.
        create: Whether a missing file is made; ``first`` means the same as ``always``.
        scheduler: How callers wait while SQLite works.
    """

    def __init__(self, url, *, create, scheduler):
        self.url = url
        self.path = Path(url.partition(':')[2]).absolute()
        if self.path.is_dir():
            raise ValueError('the path is a directory, not a database file')
        self._create = create
        self._call = scheduler.call
        self._closed = False

    def add(self, plant):
        check_plant(plant)
        return self._call(partial(self._add, plant))

    def _add(self, plant):
        with self._database() as database:
            insert = 'INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING'
            is_new = database.execute(insert, plant).rowcount == 1
            row = 'SELECT id, name, tag FROM plants WHERE id = ?'
            if Plant(*database.execute(row, [plant.id]).fetchone()) != plant:
                raise IdTaken(plant.id)
            return is_new

    def __iter__(self):
        with self._database() as database:
            rows = database.execute('SELECT id, name, tag FROM plants').fetchall()
        return iter([Plant(*row) for row in rows])

    def ping(self):
        self._call(self._ping)

    def _ping(self):
        with self._database() as database:
            database.execute('BEGIN IMMEDIATE')  # fails if an add would

    def check_opening(self):
        if self._closed or self.path.exists():
            self.ping()
        elif not os.access(self.path.parent, os.W_OK):
            reason = 'its directory does not exist, or cannot be written to'
            raise StoreUnavailable(reason, store=str(self.path))

    def close(self):
        self._closed = True

    @contextmanager
    def _database(self):
        """Open the file for one transaction, which is durable when the block ends."""
        if self._closed:
            raise StoreClosed
        mode = 'rw' if self._create == 'never' else 'rwc'
        address = f'{self.path.as_uri()}?mode={mode}'
        try:
            with closing(sqlite3.connect(address, timeout=20, uri=True)) as database:
                # With FULL a power cut may undo the last commit: in this journal mode
                # the commit is the removal of a file.
                database.execute('PRAGMA synchronous = EXTRA')
                if mode == 'rwc':
                    database.execute(TABLE)
                with database:
                    yield database
        except sqlite3.Error as ex:
            raise StoreUnavailable(str(ex), store=str(self.path)) from ex
