"""The check of a start, a reload and ``--check-config``: it changes nothing."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gunicorn.config import Config
from gunicorn.pidfile import Pidfile
from gunicorn.sock import ssl_context
from gunicorn.util import parse_address

from app import create_app
from schemas import read_file
from serving.log import Assignment, PlantsLogger
from store import DEFAULT_URL, open_store
from web.settings import Settings, is_in_memory


class Faults(list[str]):
    """The reasons why a start would fail, one sentence each."""

    @contextmanager
    def about(self, setting: str) -> Iterator[None]:
        """Add any exception, as a sentence that begins with the name of a setting."""
        try:
            yield
        except Exception as ex:
            reason = str(ex).partition('\n')[0]
            if isinstance(ex, OSError) and ex.strerror:
                reason = ': '.join(filter(None, (ex.filename, ex.strerror)))
            self.append(f'{setting}: {reason}')


def check(cfg: Config, *, is_bound: bool, is_opened_next: bool) -> Settings:
    """Try what a start does; return the settings, or raise ``ValueError``.

    ``is_bound``: a running server has these addresses (a reload or an upgrade).
    ``is_opened_next``: the caller opens the store next, so it is checked here only if
    there is another fault. The error has a line for each fault, the addresses last: a
    check beside a running server always finds them in use.
    """
    faults = Faults()
    environ = dict(os.environ)
    with faults.about('raw_env'):
        raw_env = cfg.settings['raw_env']
        raw_env.value = [Assignment(each) for each in raw_env.value]
        environ |= cfg.env
    try:
        settings = Settings.from_environ(environ)
    except ValueError as ex:
        faults += str(ex).splitlines()
    if cfg.workers < 1:
        faults.append('workers: 0 is too few: nobody would answer a request')
    if is_in_memory(environ) and cfg.workers > 1:
        faults.append(f'PLANTS_STORE: memory: needs one worker, not {cfg.workers}')
    is_made = environ.keys().isdisjoint(['PLANTS_TOKENS', 'PLANTS_TOKENS_FILE'])
    if is_made and (cfg.daemon or cfg.preload_app):
        faults.append(
            'daemon, preload_app: nobody would see the token that is made when '
            'none is configured: set PLANTS_TOKENS or PLANTS_TOKENS_FILE'
        )
    with faults.about('worker_class'):
        _ = cfg.worker_class  # gunicorn imports it at each access
    with faults.about('logger_class'):
        # gunicorn would ignore statsd_host without a message.
        if cfg.logger_class is PlantsLogger and cfg.statsd_host:
            raise ValueError('statsd_host needs gunicorn.instrument.statsd.Statsd')
    for name in ('errorlog', 'accesslog'):
        with faults.about(name):
            if (path := getattr(cfg, name)) not in (None, '-'):
                _check_file(path)
    with faults.about('pidfile'):
        if cfg.pidfile:
            _check_directory(os.path.dirname(cfg.pidfile))
            with suppress(FileNotFoundError):
                read_file(cfg.pidfile)
            if not is_bound and (pid := Pidfile(cfg.pidfile).validate()):
                raise ValueError(f'{cfg.pidfile}: process {pid} is running')
    with faults.about('worker_tmp_dir'):
        _check_directory(cfg.worker_tmp_dir or tempfile.gettempdir())
    with faults.about('schemas'):
        create_app(open_store('memory:'), tokens='unused')
    with faults.about('user, group'), as_user(cfg):
        with faults.about('certfile, keyfile'):
            if cfg.is_ssl:
                for path in filter(None, (cfg.certfile, cfg.keyfile, cfg.ca_certs)):
                    read_file(path)  # first: OpenSSL would wait for a FIFO
                ssl_context(cfg)
        is_usable = not any(fault.startswith('PLANTS_STORE') for fault in faults)
        with faults.about('PLANTS_STORE'):
            if is_usable and (faults or not is_opened_next):
                open_store(environ.get("PLANTS_STORE", DEFAULT_URL), create=False)
    for name in [] if is_bound or 'LISTEN_FDS' in os.environ else cfg.bind:
        with faults.about(f'bind: {name}'):
            _check_address(name, cfg.reuse_port)
    if faults:
        raise ValueError('\n'.join(faults))
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
        raise ValueError(f'{path}: it is not a directory that can be written to')


def _check_address(name: str, reuse_port: bool) -> None:
    """Check that a server could listen at an address; gunicorn would try five times."""
    address = parse_address(name)
    if isinstance(address, int):  # fd://3
        os.fstat(address)
    elif isinstance(address, str):
        _check_directory(os.path.dirname(address))
        if os.path.exists(address) and not Path(address).is_socket():
            raise ValueError('the path exists, and is not a socket')
    else:
        family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
            try:
                sock.bind(address)
            except OSError as ex:
                advice = 'use another one: gunicorn -b 127.0.0.1:PORT'
                raise ValueError(f'{ex.strerror} ({advice})') from ex


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
