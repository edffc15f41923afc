"""What a start, ``gunicorn --check-config`` and a reload check; it changes nothing."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gunicorn.config import Config
from gunicorn.pidfile import Pidfile
from gunicorn.sock import ssl_context

from serving.log import PlantsLogger
from web.settings import Settings, is_in_memory


def check(cfg: Config, *, is_bound: bool) -> Settings:
    """Try what a start does before it builds the application; return the settings.

    ``is_bound`` means that a server has these addresses: a reload or an upgrade.

    Raises:
        ValueError: A start would fail; the message is a sentence.
    """
    with about('raw_env'):
        environ = os.environ | cfg.env
    settings = Settings.from_environ(environ)
    if cfg.workers < 1:
        raise ValueError('workers: 0 is too few: nobody would answer a request')
    if is_in_memory(environ) and cfg.workers > 1:
        raise ValueError(
            f'PLANTS_STORE: memory: needs one worker, not {cfg.workers}: '
            f'each would hold its own plants'
        )
    if settings.tokens is None and (cfg.daemon or cfg.preload_app):
        raise ValueError(
            'daemon, preload_app: nobody would see the token that is made when '
            'none is configured: set PLANTS_TOKENS or PLANTS_TOKENS_FILE'
        )
    for name in ('logger_class', 'worker_class'):
        with about(name):
            getattr(cfg, name)  # imports the class
    # gunicorn would ignore the setting without a message.
    if cfg.statsd_host and cfg.logger_class is PlantsLogger:
        raise ValueError(
            'statsd_host: it needs --logger-class gunicorn.instrument.statsd.Statsd'
        )
    for name in ('errorlog', 'accesslog'):
        with about(name):
            if (path := getattr(cfg, name)) not in (None, '-'):
                _check_file(path)
    with about('pidfile'):
        if cfg.pidfile:
            _check_directory(os.path.dirname(cfg.pidfile))
            if not is_bound and (pid := Pidfile(cfg.pidfile).validate()):
                raise ValueError(f'{cfg.pidfile}: process {pid} runs')
    with about('worker_tmp_dir'):
        _check_directory(cfg.worker_tmp_dir or tempfile.gettempdir())
    with about('user, group'), as_user(cfg):
        pass
    with about('certfile, keyfile'), as_user(cfg):
        if cfg.is_ssl:
            ssl_context(cfg)
    with about('bind'):
        for address in cfg.address:
            if not is_bound and 'LISTEN_FDS' not in os.environ:
                _check_address(address, cfg.reuse_port)
    return settings


def _check_file(path: str) -> None:
    """Check that a file could be appended to, or made."""
    path = os.path.realpath(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
    except FileNotFoundError:
        _check_directory(os.path.dirname(path))


def _check_directory(path: str) -> None:
    if not os.access(os.path.join(path, '.'), os.W_OK | os.X_OK):
        raise ValueError(f'{path}: there is no such directory that can be written to')


def _check_address(address: int | str | tuple[str, int], reuse_port: bool) -> None:
    """Check that a server could listen at an address.

    gunicorn itself tries an address five times, with many log lines.
    """
    if isinstance(address, int):  # fd://3
        os.fstat(address)
    elif isinstance(address, str):
        _check_directory(os.path.dirname(address))
        if os.path.exists(address) and not Path(address).is_socket():
            raise ValueError(f'{address} is there, and is not a socket')
    else:
        family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET
        with about(f'{address[0]}:{address[1]}'), socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
            try:
                sock.bind(address)
            except OSError as ex:
                advice = 'to listen at another one: gunicorn -b 127.0.0.1:PORT'
                raise ValueError(f'{ex.strerror}; {advice}') from ex


@contextmanager
def about(setting: str) -> Iterator[None]:
    """Make any exception a ``ValueError`` that begins with the name of a setting."""
    try:
        yield
    except Exception as ex:
        reason = str(ex).partition('\n')[0]
        if isinstance(ex, OSError) and ex.strerror:
            reason = ': '.join(filter(None, (ex.filename, ex.strerror)))
        raise ValueError(f'{setting}: {reason}') from ex


@contextmanager
def as_user(cfg: Config) -> Iterator[None]:
    """Act as the user that serves (``--user``)."""
    user, group = os.geteuid(), os.getegid()
    try:
        os.setegid(cfg.gid)
        os.seteuid(cfg.uid)
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)
