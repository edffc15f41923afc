"""The table of plants: asked whether it keeps them; and its statements."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from store.base import ID_MAX, ID_MIN, OPTIONAL, TEXTS, Plant, check_plant
from store.postgresql.connection import Connection, Execute
from store.postgresql.database import Target, Unavailable

COLUMNS = ', '.join(Plant._fields)
TYPES = [f', {it} text{"" if it in OPTIONAL else " NOT NULL"}' for it in TEXTS]
CREATE = f'CREATE TABLE IF NOT EXISTS plants (id bigint PRIMARY KEY{"".join(TYPES)})'
# What is wrong with a relation ``it``, a partition of it, or what inherits from it.
RELATIONS = """WITH RECURSIVE tree AS (SELECT it.oid AS part
UNION SELECT inhrelid FROM tree JOIN pg_inherits ON inhparent = part)
SELECT part::regclass || CASE WHEN relkind NOT IN ('r', 'p') THEN ' is no table'
WHEN relkind = 'r' AND relpersistence <> 'p'
THEN format(' is UNLOGGED: ALTER TABLE %%s SET LOGGED', part::regclass)
WHEN part <> it.oid AND NOT relispartition THEN ' inherits, and may have the same ids'
END FROM tree JOIN pg_class AS found ON found.oid = part"""
# A type, also under a domain, may change texts, round ids, or sort them as texts. And
# without a unique index a reader would miss plants.
TYPED = f"""SELECT format('%%s is %%s, not %%s', attname, format_type(type, NULL),
CASE attname WHEN 'id' THEN 'bigint' ELSE 'text' END) FROM pg_attribute
JOIN pg_type ON pg_type.oid = atttypid,
coalesce(nullif(typbasetype, 0), atttypid) AS type
WHERE attrelid = it.oid AND attname = ANY('{{{COLUMNS}}}') AND type <> ALL((CASE attname
WHEN 'id' THEN '{{int8,int4,int2,numeric}}' ELSE '{{text,varchar}}' END)::regtype[])
UNION ALL SELECT 'id has no unique index' WHERE NOT EXISTS (SELECT FROM pg_index
JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] WHERE indrelid = it.oid
AND attname = 'id' AND indnkeyatts = 1 AND indisunique AND indisvalid AND indimmediate
AND indpred IS NULL)"""
# Each relation of this name, whether the search_path leads there, what it lacks, and
# what else is wrong.
FIND = f"""SELECT quote_ident(nspname) || '.plants',
nspname = ANY(current_schemas(false)), array(SELECT unnest('{{{COLUMNS}}}'::text[])
EXCEPT SELECT attname::text FROM pg_attribute WHERE attrelid = it.oid),
array({RELATIONS}) || array({TYPED})
FROM pg_class AS it JOIN pg_namespace AS home ON home.oid = relnamespace
WHERE relname = 'plants' AND relkind IN ('r', 'p', 'v', 'f') AND nspname !~ '^pg_'"""
# Changes nothing, and needs what an add needs: columns, a unique id, rights, writes.
CHECK = f"""INSERT INTO {{0}} ({COLUMNS})
SELECT {COLUMNS} FROM {{0}} WHERE false FOR UPDATE ON CONFLICT (id) DO NOTHING"""
# One for all sizes of a batch, so that few are prepared. An ALTER of a column ends
# those, and so the connection: the table is asked again.
VALUES = ', '.join(f'it->>{place}' for place in range(1, len(Plant._fields)))
INSERT = f"""INSERT INTO {{0}} ({COLUMNS})
SELECT (it->>0)::bigint, {VALUES} FROM json_array_elements(%s::json) AS it
ON CONFLICT (id) DO NOTHING RETURNING {COLUMNS}"""
READ = f'SELECT {COLUMNS} FROM {{0}}'
ONE = f'{READ} WHERE id = %s::bigint'
PROBE = f"""{CHECK}; SAVEPOINT probe; {INSERT}; SET CONSTRAINTS ALL IMMEDIATE;
{ONE}; ROLLBACK TO probe; COMMIT"""
PAGE = 'ORDER BY id LIMIT 1000'  # plants
ASK_EVERY = 1  # second, after which it is noticed that the table was altered
RULES = '22', '23', '44', '54', 'P0'  # which clients may keep
_encode = json.JSONEncoder(ensure_ascii=False).encode  # dumps() makes one each time


class Table:
    """The statements for the table of a database, over one connection."""

    def __init__(self, target: Target, *, to_read: bool = False) -> None:
        self._target, self._to_read = target, to_read
        self._asked = 0.0  # when
        self._connection = Connection(target, self._ask, to_read=to_read)
        self.close = self._connection.close

    def _ask(self, execute: Execute) -> None:
        """Find the table, and ask whether it keeps plants exactly, and safely.

        If there is none it is made. A second one would not know the ids of the first,
        so only if the URL names its schema: a role may have got another search_path.
        """
        target, error = self._target, self._target.unavailable('42P01')
        name = self._find(execute)
        if not name and target.create and not (target.table or self._to_read):
            try:
                execute(CREATE)
            except Unavailable as ex:  # another process may be making it
                error = ex
            name = self._find(execute)
        if not name:
            raise error
        target.table, self._asked = name, time.monotonic()

    def _find(self, execute: Execute) -> str:
        """Return the name of the table, or nothing if there is none."""
        rows = execute(FIND)
        required = {*Plant._fields} - OPTIONAL
        ours = [row for row in rows if required.isdisjoint(row[2])]
        visible = [row for row in ours if row[1]] or [row for row in rows if row[1]]
        options = str(self._target.get('options'))
        if self._target.table:
            visible = [row for row in rows if row[0] == self._target.table]
        elif ours and not visible and 'search_path' not in options:
            raise self._target.unavailable('path', f'there is {ours[0][0]}')
        complete = [row for row in visible if not row[2]]
        if len(complete) > 1:
            names = ' and '.join([row[0] for row in complete])
            raise self._target.unavailable('path', names)
        for name, _, missing, faults in complete or visible:
            if missing:
                faults = [f'{name} lacks {", ".join(missing)}']
            elif self._to_read:  # what is there now is whole
                faults = [it for it in faults if it and 'UNLOGGED' not in it]
            if wrong := '; '.join(filter(None, faults)):
                raise self._target.unavailable('table', wrong)
            return str(name)
        return ''

    def _transact(self, statements: str, *values: str, begin: str = '') -> list[Any]:
        """Execute statements for ``{0}``, the table, as one transaction."""
        if not self._target.table:
            self._connection.open()  # and ask
        elif time.monotonic() >= self._asked + ASK_EVERY:
            self._ask(self._connection.transact)
        name = self._target.table.replace('%', '%%')  # values are put in for %s
        return self._connection.transact(statements.format(name), *values, begin=begin)

    def insert(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Insert plants whose id is free, and commit; return them as they are stored.

        A trigger, or a column that cuts blanks, may have changed them.
        """
        return {row[0]: Plant(*row) for row in self._transact(INSERT, _encode(plants))}

    def lock(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with these ids, once they are safe."""
        # What no standby has confirmed is visible; the commit of a lock waits for it.
        # One row each, since a distributed engine can lock no more with one statement.
        lock = f'{ONE} FOR KEY SHARE; ' * len(plants)
        rows = self._transact(lock, *[str(plant.id) for plant in plants])
        if len(rows) < len(plants):  # one of them was deleted, or is not visible yet
            raise self._target.unavailable('40', 'the conflicting row is not visible')
        return {row[0]: Plant(*row) for row in rows}

    def read(self) -> Iterator[Plant]:
        """Yield all plants, in pages: a slow reader holds no transaction open."""
        without = self._transact(f'{READ} WHERE id IS NULL LIMIT 1')  # on no page
        rows = without or self._transact(f'{READ} {PAGE}')
        while rows:
            yield from map(self._plant, rows)
            page = f'{READ} WHERE id > %s::bigint {PAGE}'
            rows = self._transact(page, str(rows[-1][0]))

    def _plant(self, row: Sequence[Any]) -> Plant:
        """Return the plant of a row, which another program may have stored."""
        try:
            check_plant(plant := Plant(int(row[0]), *row[1:]))
            if plant.id != row[0]:
                raise ValueError('it is not an integer')
        except (TypeError, ValueError, OverflowError) as ex:
            raise self._target.unavailable('table', f'id {row[0]}: {ex}') from None
        return plant

    def check(self) -> None:
        """Check the columns and the rights."""
        self._transact(CHECK)

    def probe(self) -> None:
        """Do what an add does, with a row that is rolled back before the commit.

        The commit is written, and waits for a standby. A dead row stays until a vacuum.
        """
        plant = Plant(random.randint(ID_MIN, ID_MAX), *('Fern' for _ in TEXTS))
        values = _encode([plant]), str(plant.id)
        try:
            rows = self._transact(PROBE, *values, begin='BEGIN; ')
        except Unavailable as ex:
            if ex.code[:2] not in RULES:
                raise
        else:
            if rows != [plant, plant]:
                raise self._target.unavailable('altered', 'a trigger or a column')
