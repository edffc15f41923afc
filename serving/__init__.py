"""How gunicorn serves the plant store; ``gunicorn.conf.py`` imports all of it.

``worker.py`` serves connections, ``log.py`` writes the log, ``lifecycle.py`` checks,
starts and reloads, ``counters.py`` shares the metrics of workers, and ``internals.py``
has every use of an undocumented part of gunicorn.
"""

from __future__ import annotations

import sys

ROOMS = ('app', 'schemas', 'serving', 'store', 'web')


def forget_modules() -> None:
    """Forget every module of the service, so that the next import reads its file.

    On a reload gunicorn itself reads only ``gunicorn.conf.py`` again.
    """
    for name in list(sys.modules):
        if name.partition('.')[0] in ROOMS:
            del sys.modules[name]
