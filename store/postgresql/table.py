"""The table of plants: found once, then named with its schema; and its statements."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors
from psycopg.rows import args_row

from store.base import ID_MAX, ID_MIN, Plant
from store.postgresql.connection import Connection
from store.postgresql.reasons import Fault, explain

CREATE = """CREATE TABLE IF NOT EXISTS {}
(id bigint PRIMARY KEY, name text NOT NULL, tag text)"""
# Each table or view of this name, its place in the search_path, whether a policy hides
# rows, whether it has our columns (these first); last the one that CREATE would make.
FIND = """SELECT quote_ident(nspname) || '.plants',
array_position(current_schemas(false), nspname), row_security_active(it.oid) AND EXISTS
(SELECT 1 FROM pg_policy WHERE polrelid = it.oid
AND pg_get_expr(polqual, polrelid) <> 'true'), 3 = (SELECT count(*) FROM pg_attribute
WHERE attrelid = it.oid AND attname IN ('id', 'name', 'tag'))
FROM pg_class AS it JOIN pg_namespace AS home ON home.oid = relnamespace
WHERE relname = 'plants' AND relkind IN ('r', 'p', 'v', 'f') AND nspname !~ '^pg_'
UNION ALL SELECT quote_ident(current_schema()) || '.plants', NULL, NULL, NULL
ORDER BY 4 DESC NULLS LAST, 2"""
# Changes nothing, and needs what an add needs: columns, a unique id, rights, writes.
CHECK = """INSERT INTO {0} (id, name, tag)
SELECT id, name, tag FROM {0} WHERE false FOR UPDATE ON CONFLICT (id) DO NOTHING"""
# With VALUES each size of a batch would be a prepared statement of its own, 2 to 8 MiB
# for 100 sizes. Without casts a prepared statement fails for good after ALTER COLUMN.
INSERT = """INSERT INTO {} (id, name, tag)
SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[])
ON CONFLICT (id) DO NOTHING RETURNING id::bigint"""
READ = 'SELECT id::bigint, name::text, tag::text FROM {}'
PAGE = 1000  # plants

HIDDEN = 'the conflicting row is not visible'
# As a client might send them; a blank at the end reveals a column that removes it.
MADE_UP = [Plant(0, 'Fern '), Plant(0, 'Fern ' * 100, 'shade ' * 100)]


def find_table(connection: Connection, may_create: bool, names_schema: bool) -> str:
    """Return the name of the table of the search_path; make it if it is missing.

    A new table would not know the ids of one in another schema. If there is one, a new
    one needs a URL that names the schema: the search_path of a role may have changed.
    """
    *found, (new, *_) = connection.transact(FIND)
    ours = [row for row in found if row[-1]]
    if len(visible := [name for name, place, *_ in ours if place]) > 1:
        raise Fault('two', ' and '.join(visible))
    # Ours come first. A table of others at that place makes the check fail.
    for name, place, hides, _ in found:
        if place and hides:
            raise Fault('hides', name)
        if place:
            return str(name)
    if ours and not names_schema:
        raise Fault('elsewhere', f'there is {ours[0][0]}, and the path leads to {new}')
    if new is None:
        raise Fault('3F', 'no schema of it exists')
    if not may_create:
        raise errors.UndefinedTable(f'there is no {new}')
    # Another process may be making it.
    with suppress(
        errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject
    ):
        connection.transact(CREATE.format(new).replace('%', '%%'))
    return str(new)


class Table:
    """The statements for a table, by its name with the schema."""

    name = ''  # not found yet
    _last: Sequence[Any] = ()  # the last plant that a probe has read

    def use(self, name: str) -> None:
        """Name the table in all statements."""
        escaped = name.replace('%', '%%')  # since values are put in for %s
        self._insert = INSERT.format(escaped)
        self._read = READ.format(escaped)
        # One row each, since a distributed engine can lock no more with one statement.
        self._lock = f'{self._read} WHERE id = %s FOR UPDATE'
        self._check = CHECK.format(escaped)
        self.name = name  # last: other threads read it

    def check(self, connection: Connection) -> None:
        """Check the columns and the rights."""
        connection.transact(self._check)

    def insert(self, connection: Connection, plants: Sequence[Plant]) -> list[int]:
        """Insert plants whose id is free, and commit; return their ids."""
        if connection.is_pooled:
            rows = connection.transact(self._insert, *_arrays(plants))
        else:
            rows = connection.execute(self._insert, _arrays(plants)).fetchall()
        return [id for (id,) in rows]

    def lock(self, connection: Connection, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants that have the ids of ``plants``, once they are safe.

        A commit that was cut off while it waited for a synchronous standby is visible
        but not safe. Reading would not wait for the standby; the commit of a lock does.
        """
        ids = [str(plant.id) for plant in plants]
        try:
            rows = connection.transact('; '.join([self._lock] * len(ids)), *ids)
        except errors.LockNotAvailable as ex:  # of a row: the table accepted the INSERT
            raise Fault('55P03', str(ex.diag.message_primary)) from None
        if len(rows) < len(plants):  # one of them was deleted, or is not visible yet
            raise errors.SerializationFailure(HIDDEN)
        return {row[0]: Plant(*row) for row in rows}

    def read(self, connection: Connection) -> Iterator[Plant]:
        if not connection.is_pooled:
            cursor = connection.cursor(row_factory=args_row(Plant))
            yield from cursor.stream(self._read.replace('%%', '%'), size=PAGE)
            return
        # Pages take five times as long, but a slow reader keeps no session of the pool.
        page = f'{self._read} WHERE id >= %s ORDER BY id LIMIT {PAGE}'
        first = ID_MIN
        while first <= ID_MAX and (rows := connection.transact(page, str(first))):
            yield from (Plant(*row) for row in rows)
            first = rows[-1][0] + 1

    def probe(self, connection: Connection) -> None:
        """Do what an add does, with a row that is rolled back before the commit.

        The row is a copy of a plant, since a table may refuse what is made up. The
        commit is written, and waits for a standby. A dead row stays until the next
        vacuum. A refusal leaves the transaction open: the pool closes it.
        """
        rows = connection.transact(
            f'BEGIN; {self._read} ORDER BY id DESC LIMIT 1; '
            'SET CONSTRAINTS ALL IMMEDIATE; SAVEPOINT probe'
        )
        # If a partition was detached, the table may have no rows left.
        last = self._last = rows or self._last
        # If there is a plant, one of the three must be accepted.
        for plant in [*last, *MADE_UP]:
            try:
                self._insert_copy(connection, Plant(*plant))
                if last:
                    break
            except psycopg.Error as ex:
                found = explain(ex)
                if found.readiness == 'down' or (last and found.code == 'part'):
                    raise
                refusal = ex
                connection.transact('ROLLBACK TO probe')
        else:
            if last:
                raise refusal
        connection.transact('ROLLBACK TO probe; COMMIT')

    def _insert_copy(self, connection: Connection, plant: Plant) -> None:
        """Insert a plant with a free id near its own: in the same partition."""
        insert = f'{self._insert}, name::text, tag::text'
        for _ in range(3):
            id = plant.id + random.randint(1, 99)
            plant = plant._replace(id=id if id <= ID_MAX else random.randint(ID_MIN, 0))
            if rows := connection.transact(insert, *_arrays([plant])):
                if rows != [plant]:
                    raise Fault('altered', f'a trigger or a column of {self.name}')
                return
        raise errors.SerializationFailure(HIDDEN)


def _arrays(plants: Iterable[Plant]) -> list[str]:
    """Return the columns of plants as literals of SQL arrays."""
    # psycopg's own arrays take twice the time, and JSON a seventh more.
    columns = zip(*plants, strict=True)
    return ['{' + ','.join(map(_quoted, column)) + '}' for column in columns]


def _quoted(value: int | str | None) -> str:
    if value is None:
        return 'NULL'
    escaped = str(value).replace('\\', '\\\\').replace('"', '\\"')
    return f'"{escaped}"'
