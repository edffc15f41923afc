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
from serving.log import PlantsLogger
from serving.worker import PlantsWorker

# ---- what to run

wsgi_app = 'app:app'
master.install(lifecycle.before_run)

# ---- processes

worker_class = PlantsWorker
if 'WEB_CONCURRENCY' not in os.environ:
    workers = lifecycle.default_workers()
# For each worker. A connection takes 9 to 168 KiB (docs/deploying.md) and no thread.
worker_connections = 1_000
# For the heartbeats of workers: if a disk delayed these, gunicorn would kill workers.
if Path('/dev/shm').is_dir():
    worker_tmp_dir = '/dev/shm'
# A socket for `gunicornc`, in the home directory, which a hardened unit cannot write.
control_socket_disable = True

# ---- requests

# The C parser accepts heads that RFC 9112 refuses, and is not faster here.
http_parser = 'python'
# By default a client on this machine may set SCRIPT_NAME and PATH_INFO with headers,
# and get a 500 for it.
forwarder_headers = ''

# 8,190 bytes and 2 for the line end, which gunicorn does not count in a request line.
limit_request_field_size = 8_192

# ---- time limits, in seconds

# How long an idle connection is kept. With two seconds, the default, a client often
# finds its pooled connection closed when it sends the next request.
keepalive = 15
# Longer than an add waits (5 s): a worker answers what it has begun before it stops.
graceful_timeout = 30

# ---- the log

logger_class = PlantsLogger

# ---- hooks

when_ready = lifecycle.when_ready
worker_exit = lifecycle.worker_exit
child_exit = lifecycle.child_exit
nworkers_changed = lifecycle.nworkers_changed
on_reload = lifecycle.on_reload
pre_exec = lifecycle.pre_exec
on_exit = lifecycle.on_exit
