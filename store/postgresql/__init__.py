"""The store for those who outgrow one machine: a PostgreSQL database.

Any number of servers on any number of machines share it. It keeps to SQL that engines
which speak PostgreSQL's protocol and scale out understand too: no advisory lock, no
sequence, no lock of a table. What makes it safe:

* Plants that wait together are one *batch*: one ``INSERT`` of several rows, one commit
  (``store/group_commit.py``). The ``INSERT`` leaves out rows whose id is taken, and
  only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if it has one. A repeat is an acknowledgement too: its comparison
  locks the row and commits.
* When a connection is lost the batch is sent once more over a new one. What the first
  connection committed is found then and compared.
* Every wait has a limit at the server, and another one here for a server that hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from store.base import Create, Plant
from store.errors import StoreUnavailable
from store.lazy import LazyStore
from store.postgresql.database import Database
from store.scheduler import THREADS, Scheduler


class PostgreSQLStore(LazyStore[Database]):
    """Keep plants in the table ``plants``; as durable as a commit of the database.

    Args:
        url: ``postgresql://...``, as libpq reads it. Several hosts are tried in turn,
            and only one that can be written to is used.
        create: With ``never``, a table that is missing is not made.
        scheduler: How the callers wait.

    Raises:
        ValueError: The URL cannot be used; the message does not repeat it.
    """

    def __init__(
        self, url: str, *, create: Create = 'first', scheduler: Scheduler = THREADS
    ) -> None:
        super().__init__(scheduler=scheduler)
        # Where a password has one of these characters, libpq takes the rest of it for
        # the host or a parameter, and its error message shows that. An @ in a parameter
        # looks the same.
        pattern = '@.*@|[/?#].*@|%(?![0-9a-f]{2})'
        if re.search(pattern, url.partition('://')[2], re.DOTALL | re.IGNORECASE):
            raise ValueError(
                'percent-encode special characters in the password: % is %25, '
                '@ is %40, / is %2F, ? is %3F, # is %23'
            )
        try:
            ports = conninfo_to_dict(url).get('port', '')
        except psycopg.ProgrammingError:
            raise ValueError('it is not a URL that libpq accepts') from None
        if not re.fullmatch('[0-9,]*', str(ports)):
            raise ValueError('the port is not a number')
        self._url = url
        self._create = create

    def __iter__(self) -> Iterator[Plant]:
        return self._backend().plants()

    def check_opening(self) -> None:
        try:
            self.ping()
        except StoreUnavailable as ex:
            if not isinstance(ex.__cause__, errors.UndefinedTable):  # it can be made
                raise

    def _open_backend(self) -> Database:
        return Database(self._url, self._create, self._scheduler, self._report_sync)
