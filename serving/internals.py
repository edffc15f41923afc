"""Every use of an undocumented part of gunicorn's master, checked against 27.0.1."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers.base import Worker


def run_with(before: Callable[[WSGIApplication], None]) -> None:
    """Have a function called before gunicorn runs, also for ``--check-config``.

    gunicorn's own check only imports the application and calls no hook, and what is
    refused after ``--daemon`` took effect has no terminal to be told on.
    """
    run = WSGIApplication.run
    if run.__module__ == __name__:
        return  # a reload reads the configuration again

    def run_after(application: WSGIApplication) -> None:
        before(application)
        run(application)

    WSGIApplication.run = run_after


def application_name(application: WSGIApplication) -> str:
    """Return what gunicorn is to serve, ``MODULE:NAME``."""
    return str(application.app_uri)


def preload(application: WSGIApplication, callable: Any) -> None:
    """Have all workers that are forked from now on serve an application."""
    application.callable = callable


def start_command(server: Arbiter) -> tuple[list[str], str]:
    """Return the arguments of the command that started a master, and where it was."""
    return sys.argv[1:], server.START_CTX['cwd']


def use_same_command(server: Arbiter) -> None:
    """Upgrade (SIGUSR2) with the very command that started this server.

    gunicorn makes it up from ``sys.argv``, and ``python -m gunicorn`` becomes a path
    inside its package: there ``import http`` finds gunicorn's own, and nothing starts.
    """
    server.START_CTX['args'] = [sys.executable, *sys.orig_argv[1:]]


def remove_pidfile(server: Arbiter) -> None:
    """Remove the file with the process id: gunicorn makes it before it starts."""
    if server.pidfile is not None:
        server.pidfile.unlink()


def bound_addresses(server: Arbiter) -> list[str]:
    """Return where a master listens, with ports that the system has chosen."""
    return [str(listener) for listener in server.LISTENERS]


def hand_over(server: Arbiter, *names: str) -> None:
    """Give variables to the master of an upgrade, which has those of before the start.

    Args:
        server: The master.
        names: Those that are set.
    """
    for name in os.environ.keys() & names:
        server.cfg.env_orig[name] = os.environ[name]


def siblings(server: Arbiter) -> list[Worker]:
    """Return the workers that are running."""
    return list(server.WORKERS.values())


def is_upgrading(server: Arbiter) -> bool:
    """Whether another master of an upgrade runs beside this one."""
    return not server.reexec_pid == server.master_pid == 0


def reset_signals(server: Arbiter) -> None:
    """Let a worker that has just been forked be stopped.

    A stop that reaches a worker before it has its own signal handlers would find those
    of the master, which only queue it: the worker would go on until it is killed.
    """
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    for number in stops:
        signal.signal(number, signal.SIG_DFL)
    while not server.SIG_QUEUE.empty():  # what was queued since the fork
        if server.SIG_QUEUE.get() in stops:
            sys.exit()
