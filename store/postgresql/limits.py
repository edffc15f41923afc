"""How long the PostgreSQL store waits, and how much it does at once.

Times are in seconds. Read them as ``limits.NAME``, so that a test can change them.
"""

from __future__ import annotations

# To make a connection, and to get one when all are in use.
CONNECT_WITHIN = 2
# For one statement: the limit of the server, and ours. The server's is shorter, because
# its error says what happened.
STATEMENT_WITHIN = 4
ANSWER_WITHIN = 5
CANCEL_WITHIN = 1
# For a lock while other plants wait in the same batch, and in all for a plant that is
# known to be locked.
LOCK_WITHIN = 0.1
LOCKED_WITHIN = 2
# Between two attempts to reach a database that does not answer.
RETRY_AFTER = 0.1

BATCHES_IN_FLIGHT = 4
# One for each batch, one for plants that are locked, one for the readiness probe.
MOST_CONNECTIONS = BATCHES_IN_FLIGHT + 2
# For a batch that the server cannot serialize. The last pause is at most half a second.
ATTEMPTS = 10
# Rows of one statement in a bulk copy, so that it ends within STATEMENT_WITHIN.
MOST_ROWS = 10_000
# More ids than this are not remembered as locked.
MOST_LOCKED_IDS = 10_000
