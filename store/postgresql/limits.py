"""How long the PostgreSQL store waits, and how much it does at once.

Times are in seconds. Read them as ``limits.NAME``, so that a test can change them.
"""

from __future__ import annotations

from store.group_commit import SLOW_SYNCS_IN_FLIGHT

# To make a connection, and to get one when all are in use.
CONNECT_WITHIN = 2
# For one statement: the limit of the server, and ours. The server's is shorter, because
# its error says what happened.
STATEMENT_WITHIN = 4
ANSWER_WITHIN = 5
CANCEL_WITHIN = 1
# For a lock that another session holds: other plants wait in the same batch.
LOCK_WITHIN = 0.3
# A plant that was found locked is refused at once for so long.
LOCKED_FOR = 0.5
# For the plants of a refused batch, each by itself, until the last one begins.
ALONE_WITHIN = 1
# Between two attempts to reach a database that does not answer.
RETRY_AFTER = 0.1

# One for each batch, one for a bulk copy, one for the readiness probe.
MOST_CONNECTIONS = SLOW_SYNCS_IN_FLIGHT + 2
# For a batch that the server cannot serialize, with pauses of half a second in all.
ATTEMPTS = 9
# Characters of one statement in a bulk copy, so that it ends within STATEMENT_WITHIN.
# A row counts ROW more than its texts.
MOST_CHARACTERS = 1_000_000
ROW = 100
