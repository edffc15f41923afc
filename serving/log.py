"""The log: gunicorn's, in two formats, with the service's own lines in it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from gunicorn.config import Config
from gunicorn.glogging import Logger

from web.settings import is_json_log

# The loggers of the service; web/ and store/ know no others.
NAMES = ('plants', 'store')
# How long a line may wait for others, in seconds.
BATCH_TIME = 0.005

_encode = json.JSONEncoder(default=str).encode


class TextFormatter(logging.Formatter):
    """gunicorn's format, with the time of a second written once."""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.stack_info:
            return super().format(record)
        created = _local_time(int(record.created))
        return (
            f'{created} [{record.process}] [{record.levelname}] {record.getMessage()}'
        )


class JSONFormatter(logging.Formatter):
    """One JSON object a line, for log collectors.

    Every object has ``time`` (RFC 3339, UTC), ``level``, ``pid``, ``logger`` and
    ``message``, and ``exception`` if there is a traceback. A mapping that was logged
    gives its members, ``message`` among them.
    """

    def format(self, record: logging.LogRecord) -> str:
        second, fraction = divmod(record.created, 1)
        line: dict[str, Any] = {
            'time': f'{_utc_time(int(second))}.{int(1000 * fraction):03}Z',
            'level': record.levelname,
            'pid': record.process,
            'logger': record.name,
        }
        # NOTE: gunicorn logs an access with a mapping, too: of all that it knows of a
        # request, its token included.
        if isinstance(record.args, dict) and 'message' in record.args:
            line.update(record.args)
        else:
            line['message'] = record.getMessage()
        if record.exc_info:
            line['exception'] = self.formatException(record.exc_info)
        return _encode(line)


@lru_cache(maxsize=1)
def _local_time(second: int) -> str:
    return time.strftime(Logger.datefmt, time.localtime(second))


@lru_cache(maxsize=1)
def _utc_time(second: int) -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))


class BatchingHandler(logging.Handler):
    """Writes the lines of a few milliseconds with one system call.

    Code that has not run for a moment is slow: a line formatted and written in the
    middle of each request takes 28 us, in a row with others 12.

    Args:
        targets: The handlers that the lines are for.
    """

    def __init__(self, targets: Iterable[logging.Handler]) -> None:
        super().__init__()
        self._targets = list(targets)
        self._records: list[logging.LogRecord] = []
        self._loop: Any = None
        self._timer: Any = None
        self._thread = 0

    def batch_with(self, loop: Any) -> None:
        """Write lines from a timer of an event loop, no longer at once.

        Args:
            loop: gevent's event loop of this thread.
        """
        self._timer = loop.timer(BATCH_TIME)
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        if self._timer is None or threading.get_ident() != self._thread:
            self.flush()
        elif len(self._records) == 1:
            self._timer.start(self.flush)

    def flush(self) -> None:
        records, self._records = self._records, []
        for target in self._targets if records else ():
            try:
                _write(target, records)
            except Exception:
                # A full disk must not make a 500 of a 200.
                target.handleError(records[0])


def _write(target: logging.Handler, records: list[logging.LogRecord]) -> None:
    if isinstance(target, logging.StreamHandler):
        lines = ''.join([f'{target.format(record)}\n' for record in records])
        with target.lock:  # type: ignore[union-attr]
            target.stream.write(lines)
            target.flush()
    else:
        for record in records:
            target.handle(record)


class PlantsLogger(Logger):  # type: ignore[misc]
    """gunicorn's log in our formats, with the service's own lines in it.

    NOTE: for ``--statsd-host`` gunicorn needs a logger class of its own.
    """

    def setup(self, cfg: Config) -> None:
        # Called at the start, before any hook, and at each reload.
        super().setup(cfg)
        # NOTE: the module as it is now: gunicorn keeps this object over a reload.
        import_module('serving.log').configure(self, cfg)


def configure(log: Logger, cfg: Config) -> None:
    """Give the handlers of gunicorn our formats, and the service's loggers handlers.

    Args:
        log: gunicorn's log.
        cfg: gunicorn's settings; ``--env`` is not in the environment yet.
    """
    # What Python documents as switches for speed: the line of code that logs, its
    # thread and its process's name are found out for every record, and not shown.
    logging._srcfile = None
    logging.logThreads = False
    logging.logMultiprocessing = False
    error_format: logging.Formatter = TextFormatter(log.error_fmt, log.datefmt)
    if is_json_log(os.environ | cfg.env):
        error_format = JSONFormatter()
        for handler in log.access_log.handlers:
            handler.setFormatter(error_format)
    for handler in log.error_log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(error_format)
    batching = BatchingHandler(log.error_log.handlers)
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [batching]
        logger.setLevel(log.error_log.level)
        logger.propagate = False


def batch_lines(loop: Any) -> None:
    """Write the service's lines from a timer of an event loop, no longer at once."""
    for handler in logging.getLogger(NAMES[0]).handlers:
        if isinstance(handler, BatchingHandler):
            handler.batch_with(loop)
