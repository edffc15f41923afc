"""How gunicorn serves the plant store; ``gunicorn.conf.py`` names what it uses.

This directory uses parts of gunicorn that are not documented. ``CHECKED`` is the
version that they were checked against; a test fails under another one.

* ``heads``: ``gunicorn.http``, for requests, bodies, responses and WSGI environments;
* ``client``: what ``gunicorn.http`` calls of a socket;
* ``worker``: ``run`` and ``patch`` of the gevent worker, its sockets, responses, TLS;
* ``master``: the arbiter, above all ``reload``, ``setup`` and ``reap_workers``;
* ``lifecycle``: attributes of the arbiter, and the environment of an upgrade;
* ``check``: the pid file, TLS, and the settings as an object;
* ``log``: how the logger makes its handlers.
"""

CHECKED = '27.0.1'
