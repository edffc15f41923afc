"""The number of connections of each worker, in memory that all workers share.

A reload does not import this module again: old and new workers use the same memory.
"""

import mmap

# A worker's age gives its slot, which has the number plus one, or 0 for no worker.
SLOTS = 256
connection_counts = memoryview(mmap.mmap(-1, 4 * SLOTS)).cast('I')
