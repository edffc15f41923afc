"""How gunicorn serves the plant store: `gunicorn` alone, in this directory.

Each setting is here because its default is wrong for this service. All of them give way
to the command line and to GUNICORN_CMD_ARGS. They are in the order of a server's life.
"""

import os
import sys
from pathlib import Path

# For -c from elsewhere. A reload reads this file again.
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
# Of each worker. A connection takes 13 to 168 KiB (docs/deploying.md), and no thread.
worker_connections = 1_000
# For the heartbeat of workers. On a disk that hangs, gunicorn would kill the workers.
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

# 8,190 bytes and the end of the line. gunicorn counts both, but not in a request line.
limit_request_field_size = 8_192

# ---- time limits, in seconds

# How long an idle connection is kept. Clients pool connections; at two seconds, the
# default, they often find theirs closed just as they send.
keepalive = 15
# Longer than any sync: before a worker stops it answers the requests it has begun.
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
