"""What gunicorn needs to serve the plant store; ``gunicorn.conf.py`` names it.

``worker.py`` serves connections, ``log.py`` writes the log, ``lifecycle.py`` checks,
starts and reloads, ``counters.py`` shares what workers count, and ``internals.py`` has
every touch of what gunicorn keeps to itself.
"""

from __future__ import annotations

import sys

ROOMS = ('app', 'schemas', 'serving', 'store', 'web')


def forget_modules() -> None:
    """Forget every module of the service, so that the next import reads its file.

    A reload reads ``gunicorn.conf.py`` again; this makes it read the rest, too.
    """
    for name in list(sys.modules):
        if name.partition('.')[0] in ROOMS:
            del sys.modules[name]
