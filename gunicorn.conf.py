"""The settings of gunicorn for the plant store: run `gunicorn` in this directory.

A setting is here if gunicorn's default is wrong for this service, or if our pages
promise the value. The command line and GUNICORN_CMD_ARGS override these settings.
"""

import os
import sys
from pathlib import Path

# For `gunicorn -c` in another directory. A reload runs this file again.
if (directory := str(Path(__file__).absolute().parent)) not in sys.path:
    sys.path.insert(0, directory)

from serving import lifecycle, master
from web.settings import is_set

# ---- what to run

wsgi_app = 'serving.lifecycle:build()'
# In the master: all workers have the same settings, schemas, tokens and plants.
preload_app = True
# For platforms that set PORT: gunicorn would listen on IPv4 alone.
if 'PORT' in os.environ:
    bind = lifecycle.addresses(os.environ['PORT'])

# ---- processes

worker_class = 'serving.worker.PlantsWorker'
if 'WEB_CONCURRENCY' not in os.environ:
    workers = os.cpu_count() or 1
    if hasattr(os, 'sched_getaffinity'):  # macOS has none
        workers = len(os.sched_getaffinity(0))
    if is_set(os.environ, 'PLANTS_STORE', 'memory:'):
        workers = 1
# For each worker. A connection takes some KiB (docs/deploying.md) and no thread.
worker_connections = 1_000
# For the heartbeats of workers: if a disk delayed these, gunicorn would kill workers.
if os.access('/dev/shm', os.W_OK):
    worker_tmp_dir = '/dev/shm'
# A socket for `gunicornc`, in the home directory, which a container cannot write.
control_socket_disable = True

# ---- time limits, in seconds

# With two seconds, the default, a client often finds a pooled connection closed.
keepalive = 15
# Longer than an add waits (5 s): a worker answers what it has begun before it stops.
graceful_timeout = 30

# ---- the log, and the hooks

logger_class = 'serving.log.PlantsLogger'
on_starting = master.on_starting
pre_fork = master.pre_fork
post_worker_init = master.post_worker_init
