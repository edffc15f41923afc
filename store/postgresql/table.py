"""The table of plants: asked whether it keeps them; and its statements."""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from store.base import ID_MAX, ID_MIN, OPTIONAL, TEXTS, Plant, check_plant, to_json
from store.postgresql.connection import Connection, log
from store.postgresql.database import Target, Unavailable

COLUMNS = ', '.join(Plant._fields)
TYPES = [f', {it} text{"" if it in OPTIONAL else " NOT NULL"}' for it in TEXTS]
CREATE = f'CREATE TABLE IF NOT EXISTS plants (id bigint PRIMARY KEY{"".join(TYPES)})'
FIND = """SELECT concat(quote_ident(nspname), '.plants'),
nspname = ANY(current_schemas(false)) AS is_on_path
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace AND nspname !~ '^pg_'
WHERE relname = 'plants' AND (relkind ~ '[fmprv]' OR nspname = current_schema())"""
# Other types, also under a domain, may change texts, round ids, or sort them as texts.
MEMBERS = ["('id', 'bigint', '{int8,int4,int2}')"]
MEMBERS += [f"('{it}', 'text', '{{text,varchar}}')" for it in TEXTS]
# What is wrong with a table of a name. A reader would miss plants whose ids are not
# unique, or NULL, and find some twice with what inherits.
FAULTS = f"""SELECT 'the encoding is ' || setting FROM pg_settings
WHERE name = 'server_encoding' AND setting <> 'UTF8';
SELECT CASE WHEN atttypid IS NULL THEN 'lacks ' || member
WHEN type <> ALL(exact::regtype[])
THEN concat(member, ' is ', format_type(type, NULL), ', not ', wanted)
WHEN member = 'id' AND NOT (attnotnull AND EXISTS (SELECT FROM pg_index
WHERE indrelid = attrelid AND indkey[0] = attnum AND indnkeyatts = 1 AND indisunique
AND indisvalid AND indpred IS NULL) AND NOT EXISTS (SELECT FROM pg_constraint
WHERE conrelid = attrelid AND conkey = ARRAY[attnum] AND contype = 'n'
AND NOT convalidated)) THEN 'id is not UNIQUE and NOT NULL' END
FROM (VALUES {', '.join(MEMBERS)}) AS needed (member, wanted, exact)
LEFT JOIN pg_attribute ON attrelid = %s::regclass AND attname = member
LEFT JOIN pg_type ON pg_type.oid = atttypid,
coalesce(nullif(typbasetype, 0), atttypid) AS type;
WITH RECURSIVE tree AS (SELECT %s::regclass::oid AS part, true AS is_root
UNION SELECT inhrelid, false FROM tree JOIN pg_inherits ON inhparent = part)
SELECT part::regclass || CASE WHEN relkind NOT IN ('r', 'p') THEN ' is no table'
WHEN relkind = 'r' AND relpersistence <> 'p'
THEN ' is UNLOGGED: ALTER TABLE ' || part::regclass || ' SET LOGGED'
WHEN NOT (is_root OR relispartition) THEN ' inherits, and may have the same ids' END
FROM tree JOIN pg_class ON oid = part"""
# One for all sizes of a batch, so that few are prepared. An ALTER of a column ends
# those, and so the connection: the table is asked again.
VALUES = ', '.join(f'it->>{place}' for place in range(1, len(Plant._fields)))
INSERT = f"""INSERT INTO {{0}} ({COLUMNS})
SELECT (it->>0)::bigint, {VALUES} FROM json_array_elements(%s::json) AS it
ON CONFLICT (id) DO NOTHING RETURNING {COLUMNS}"""
READ = f'SELECT {COLUMNS} FROM {{0}}'
WHICH = 'SELECT $it${0}$it$::regclass::oid'  # a restore makes it anew, empty at first
ONE = f'{READ} WHERE id = %s::bigint'
LOCK = f'{ONE} FOR KEY SHARE'
PROBE = f"""BEGIN; {LOCK}; SAVEPOINT probe; {INSERT}; SET CONSTRAINTS ALL IMMEDIATE;
{ONE}; ROLLBACK TO probe; COMMIT"""
PAGE = 'ORDER BY id LIMIT 1000'  # plants
ASK_EVERY = 1  # second, so it is noticed that the table was altered


class Table:
    """The statements for the table of a database, for one thread at a time.

    A connection is opened when it is needed, and again if it was lost.
    """

    def __init__(self, target: Target, *, to_read: bool = False) -> None:
        self._target, self._to_read = target, to_read
        self._connection: Connection | None = None

    def transact(self, statements: str, *values: str) -> list[Any]:
        """Execute statements for ``{0}``, the table, as one transaction; return rows.

        If the server refuses, and a new connection may help, execute them once more.
        """
        if self._connection is not None and not self._connection.is_usable():
            self.close()
        was_open = self._connection is not None
        try:
            connection = self._connection or Connection(self._target, self._to_read)
            self._connection = connection
            if time.monotonic() >= connection.ask_at:
                self._target.table = self._ask(connection)
                connection.ask_at = time.monotonic() + ASK_EVERY
            name = self._target.table.replace('%', '%%')  # values are put in for %s
            return connection.execute(statements.format(name), *values)
        except Unavailable as ex:
            if ex.retry != 'connect' or not was_open:
                raise
        self.close()
        return self.transact(statements, *values)

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, connection: Connection) -> str:
        """Return the name of the table, if it keeps plants exactly, and safely.

        If there is none it is made, but no second one, which would not know the ids.
        """
        target, error = self._target, self._target.unavailable('missing')
        name = target.table or self._find(connection)
        if not name and target.create and not self._to_read:
            try:
                connection.execute(CREATE)
                log.warning('%s: a new, empty table plants was made', target.shown)
            except Unavailable as ex:  # another process may be making it
                error = ex
            name = self._find(connection)
        if not name:
            raise error
        if faults := [it for (it,) in connection.execute(FAULTS, name, name) if it]:
            raise target.unavailable('table', f'{name}: {"; ".join(faults)}')
        return name

    def _find(self, connection: Connection) -> str:
        """Return the name of the table, or nothing if there is none.

        A table elsewhere may be ours, since a role may have got another search_path.
        An index, a sequence or a type is none, but where it has the name of a new one.
        """
        rows = connection.execute(FIND)
        found = [name for name, is_on_path in rows if is_on_path]
        is_named = 'search_path' in str(self._target.get('options'))
        if len(found) > 1 or (rows and not found and not is_named):
            there = ' and '.join(found or [name for name, _ in rows])
            raise self._target.unavailable('path', f'there is {there}')
        return ''.join(found)

    def insert(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Insert plants whose id is free; return them as they are stored."""
        return {row[0]: Plant(*row) for row in self.transact(INSERT, to_json(plants))}

    def lock(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with these ids, once they are safe."""
        # What no standby has confirmed is visible; the commit of a lock waits for it.
        # One row each, since a distributed engine can lock no more with one statement.
        ids = [str(int(plant.id)) for plant in plants]
        rows = self.transact('; '.join([LOCK] * len(plants)), *ids)
        if len(rows) < len(plants):  # one of them was deleted, or is not visible yet
            raise self._target.unavailable('altered', 'the row cannot be seen')
        return {row[0]: Plant(*row) for row in rows}

    def read(self) -> Iterator[Plant]:
        """Yield all plants, in pages: a slow reader holds no transaction open."""
        which = self.transact(WHICH)
        page: tuple[str, ...] = (f'{READ} {PAGE}',)
        while rows := self.transact(*page):
            for row in rows:
                try:  # another program may have stored a row without a name
                    check_plant(plant := Plant(*row))
                except ValueError as ex:
                    detail = f'id {row[0]}: {ex}'
                    raise self._target.unavailable('table', detail) from None
                yield plant
            page = f'{READ} WHERE id > %s::bigint {PAGE}', str(rows[-1][0])
        if self.transact(WHICH) != which:
            raise self._target.unavailable('table', 'it was made anew meanwhile')

    def probe(self, least: int = ID_MIN, most: int = ID_MAX) -> None:
        """Do what an add does, also the commit, but roll back the row before it."""
        plant = Plant(random.randint(least, most), *('Fern' for _ in TEXTS))
        id = str(plant.id)
        try:
            rows = self.transact(PROBE, id, to_json([plant]), id)
        except Unavailable as ex:
            if ex.code == '22003' and most == ID_MAX:  # for an integer, or a smallint
                self.probe(-(2**15), -1)
            elif ex.retry != 'rule':  # which clients may keep
                raise
        else:
            if rows != [plant, plant]:
                raise self._target.unavailable('altered', 'a trigger or a column')
