"""A store of plants in another package: a table in an SQLite file."""

import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path

from store import IdTaken, Plant, StoreUnavailable
from store.committer import CommittedStore

NAMES = ', '.join(Plant._fields)
TABLE = f'CREATE TABLE IF NOT EXISTS plants ({NAMES}, PRIMARY KEY (id)) WITHOUT ROWID'
MARKS = ', '.join('?' for _ in Plant._fields)
INSERT = f'INSERT INTO plants ({NAMES}) VALUES ({MARKS}) ON CONFLICT DO NOTHING'
SELECT = f'SELECT {NAMES} FROM plants'


class SQLiteStore(CommittedStore):
    """Keep plants in an SQLite file; they outlive a power cut.

    The base class has the thread that uses the file, gathers plants into batches, and
    lets callers wait.

    Args:
        url: ``sqlite:PATH``. A ``ValueError`` must not repeat it.
        create: Whether a missing file is made, at the first use.
        scheduler: How callers wait.
    """

    def __init__(self, url, *, create, scheduler):
        self.url = url
        self.path = Path(url.partition(':')[2]).absolute()
        if self.path.is_dir():
            raise ValueError('the path is a directory, not a database file')
        self._database = Database(self.path, create)
        super().__init__(str(self.path), scheduler=scheduler)

    def __iter__(self):
        self._check_open()
        with self._database.transaction() as connection:
            rows = connection.execute(SELECT).fetchall()
        return iter([Plant(*row) for row in rows])

    def _open_backend(self):
        return self._database


class Database:
    """The file. Each batch opens it, so no connection is open at a fork."""

    def __init__(self, path, create):
        self._path = path
        self._create = create

    def append(self, batch):
        """Store a batch of plants, in one transaction."""
        with self.transaction() as connection:
            for entry in batch:
                plant = entry.item
                entry.new = connection.execute(INSERT, plant).rowcount == 1
                row = connection.execute(f'{SELECT} WHERE id = ?', [plant.id])
                if Plant(*row.fetchone()) != plant:
                    entry.error = IdTaken(plant.id)

    def ping(self):
        """Begin a transaction as an add does, and end it."""
        with self.transaction():
            pass

    def close(self):
        """Release nothing: no connection is open."""

    @contextmanager
    def transaction(self):
        """Open the file for one transaction, which is durable when the block ends."""
        address = f'{self._path.as_uri()}?mode={"rwc" if self._create else "rw"}'
        try:
            # Callers wait for 5 seconds at most, and should hear the reason.
            with closing(sqlite3.connect(address, timeout=4, uri=True)) as connection:
                # With FULL a power cut may undo the last commit: in this journal mode
                # the commit is the removal of a file.
                connection.execute('PRAGMA synchronous = EXTRA')
                if self._create:
                    connection.execute(TABLE)
                    self._create = False  # an empty one would give its ids again
                with connection:
                    connection.execute('BEGIN IMMEDIATE')
                    yield connection
        except sqlite3.Error as ex:
            raise StoreUnavailable(str(ex), store=str(self._path)) from ex
