"""The table of plants: found once, then named with its schema; and its statements."""

import json
import os
import random
from collections.abc import Iterator, Sequence

from store.base import ID_MAX, ID_MIN, OPTIONAL, TEXTS, Plant
from store.postgresql.database import Database
from store.postgresql.reasons import Unavailable

COLUMNS = ', '.join(Plant._fields)
TYPES = [f', {it} text{"" if it in OPTIONAL else " NOT NULL"}' for it in TEXTS]
CREATE = f'CREATE TABLE IF NOT EXISTS plants (id bigint PRIMARY KEY{"".join(TYPES)})'
# Each table or view of this name, whether the search_path leads there, what it lacks.
FIND = f"""SELECT quote_ident(nspname) || '.plants',
nspname = ANY(current_schemas(false)), array(SELECT unnest('{{{COLUMNS}}}'::text[])
EXCEPT SELECT attname::text FROM pg_attribute WHERE attrelid = it.oid)
FROM pg_class AS it JOIN pg_namespace AS home ON home.oid = relnamespace
WHERE relname = 'plants' AND relkind IN ('r', 'p', 'v', 'f') AND nspname !~ '^pg_'"""
# Changes nothing, and needs what an add needs: columns, a unique id, rights, writes.
CHECK = f"""INSERT INTO {{0}} ({COLUMNS})
SELECT {COLUMNS} FROM {{0}} WHERE false FOR UPDATE ON CONFLICT (id) DO NOTHING"""
# One for all sizes of a batch, so that few are prepared. It returns no text: a prepared
# statement fails after an ALTER that changes the collation of what it returns.
VALUES = ', '.join(f'it->>{place}' for place in range(1, len(Plant._fields)))
INSERT = f"""INSERT INTO {{0}} ({COLUMNS})
SELECT (it->>0)::bigint, {VALUES} FROM json_array_elements(%s::json) AS it
ON CONFLICT (id) DO NOTHING RETURNING id::bigint"""
SHOWN = ', '.join(f'{it}::text' for it in TEXTS)
READ = f'SELECT id::bigint, {SHOWN} FROM {{0}}'
LAST = f'{READ} ORDER BY id DESC LIMIT 1'
PROBE = f"""{CHECK}; SAVEPOINT probe; {INSERT}, {SHOWN};
SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO probe; COMMIT"""
PAGE = 1000  # plants
_encode = json.JSONEncoder(ensure_ascii=False).encode  # dumps() makes one each time
MADE_UP = Plant(0, *('Fern ' * 100 for _ in TEXTS))  # a column may cut it
RULES = '22', '23', '44', '54', 'P0'  # which may forbid what is made up


class Table:
    """The statements for the table of a database."""

    def __init__(self, database: Database) -> None:
        self._database, self._target = database, database.target
        self._last: Plant | None = None  # the last plant that a probe has read

    @property
    def name(self) -> str:
        """The table, with its schema; if the database has none it is made.

        A second one would not know the ids of the first. So it is made only if the URL
        names its schema: the search_path of a role may have changed.
        """
        if not self._target.table:
            name, error = self._find(), self._unavailable('42P01')
            if not name and self._target.create and not self._database.to_read:
                try:
                    self._database.transact(CREATE)
                except Unavailable as ex:  # another process may be making it
                    error = ex
                name = self._find()
            if not name:
                raise error
            self._target.table = name.replace('%', '%%')  # values are put in for %s
        return self._target.table

    def _find(self) -> str:
        """Return the name of the table, or nothing if there is none."""
        rows = self._database.transact(FIND)
        required = {*Plant._fields} - OPTIONAL
        ours = [row for row in rows if required.isdisjoint(row[2])]
        visible = [row for row in ours if row[1]] or [row for row in rows if row[1]]
        options = self._target.parameters.get('options', os.environ.get('PGOPTIONS'))
        if ours and not visible and 'search_path' not in str(options):
            raise self._unavailable('path', f'there is {ours[0][0]}')
        complete = [name for name, _, missing in visible if not missing]
        if len(complete) > 1:
            raise self._unavailable('path', ' and '.join(complete))
        if visible and not complete:
            name, _, missing = visible[0]
            raise self._unavailable('unfit', f'{name} lacks {", ".join(missing)}')
        return str(complete[0]) if complete else ''

    def insert(self, plants: Sequence[Plant]) -> list[int]:
        """Insert plants whose id is free, and commit; return their ids."""
        rows = self._database.transact(INSERT.format(self.name), _encode(plants))
        return [id for (id,) in rows]

    def lock(self, plants: Sequence[Plant]) -> dict[int, Plant]:
        """Return the stored plants with these ids, once they are safe."""
        # What no standby has confirmed is visible; the commit of a lock waits for it.
        # One row each, since a distributed engine can lock no more with one statement.
        lock = f'{READ} WHERE id = %s FOR KEY SHARE; '.format(self.name) * len(plants)
        rows = self._database.transact(lock, *[str(plant.id) for plant in plants])
        if len(rows) < len(plants):  # one of them was deleted, or is not visible yet
            raise self._unavailable('40', 'the conflicting row is not visible')
        return {row[0]: Plant(*row) for row in rows}

    def read(self) -> Iterator[Plant]:
        """Yield all plants, in pages: a slow reader holds no transaction open."""
        page = f'{READ} WHERE id >= %s ORDER BY id LIMIT {PAGE}'.format(self.name)
        first = ID_MIN
        while first <= ID_MAX and (rows := self._database.transact(page, str(first))):
            yield from (Plant(*row) for row in rows)
            first = rows[-1][0] + 1

    def check(self) -> None:
        """Check the columns and the rights."""
        self._database.transact(CHECK.format(self.name))

    def probe(self) -> None:
        """Do what an add does, with a row that is rolled back before the commit.

        The row is a copy of a plant, since a table may refuse what is made up. The
        commit is written, and waits for a standby. A dead row stays until a vacuum.
        """
        last, probe = LAST.format(self.name), PROBE.format(self.name)
        for row in self._database.transact(last):
            self._last = Plant(*row)
        # No client has the first id. If a rule forbids that, the others are in the
        # partition of the plant, but clients that count up may take them meanwhile.
        plant = self._last or MADE_UP
        near = [plant.id + random.randint(1, 99) for _ in range(4)]
        for id in random.randint(ID_MIN, ID_MAX), *near:
            copy = plant._replace(id=id if id <= ID_MAX else id - 200)
            try:
                rows = self._database.transact(probe, _encode([copy]), begin='BEGIN; ')
            except Unavailable as ex:
                is_made_up = self._last is None and ex.code[:2] in RULES
                if ex.code == '23505' or is_made_up:  # a rule that plants may keep
                    return
                if ex.retry != 'each' or id in near:
                    raise
            else:
                if rows == [copy]:
                    return
        raise self._unavailable('altered', f'a trigger or a column of {self.name}')

    def _unavailable(self, code: str, detail: str = '') -> Unavailable:
        return Unavailable(code, self._target.shown, detail)
