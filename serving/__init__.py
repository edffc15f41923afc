"""How gunicorn serves the plant store; ``gunicorn.conf.py`` names what it uses.

``worker.py`` serves connections, ``log.py`` writes the log, ``lifecycle.py`` checks,
starts and ends a server, and ``master.py`` reloads it.
"""
