"""The store for those who outgrow one machine: a PostgreSQL database.

* A process has one connection, which the committer uses. A *batch* of plants that wait
  together is one ``INSERT``, one commit. The ``INSERT`` leaves out rows whose id is
  taken, and only those are compared.
* A plant is *acknowledged* after a commit that the database has confirmed, and its
  synchronous standby, if any. To compare a repeat the store locks the row and commits.
* A connection that was lost before a batch was sent is opened again. If it is lost
  between sending and answer nobody knows what was stored, so the answer is no.
* Every wait has a limit at the server, and a longer one here for a server that hangs.
* Engines that scale out lack advisory locks, sequences and table locks: none is used.
"""

from collections.abc import Iterator

from store.base import Plant
from store.committer import CommittedStore, Gather
from store.masking import masked
from store.postgresql.plants import Plants
from store.postgresql.target import Target
from store.scheduler import THREADS, Scheduler

# Commits of a server that has nothing else to do take less than 1.5 ms.
GATHER = Gather(slow=0.0015, share=0.5)


class PostgreSQLStore(CommittedStore):
    """Keep plants in the table ``plants``; as durable as a commit of the database.

    The arguments are those of ``open_store``. A ``ValueError`` does not repeat the URL.
    """

    def __init__(
        self, url: str, *, create: bool = True, scheduler: Scheduler = THREADS
    ) -> None:
        super().__init__(masked(url), GATHER, scheduler=scheduler)
        self._target = Target(url, create)

    def __iter__(self) -> Iterator[Plant]:
        self._check_open()
        return self._open_backend().read()

    def _open_backend(self) -> Plants:
        return Plants(self._target)

    def _record(self, plant: Plant) -> tuple[Plant, int]:
        return plant, sum([len(text or '') for text in plant[1:]])
