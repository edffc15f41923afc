"""The log: gunicorn's, also as JSON, with the service's own lines in it."""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from logging import LogRecord
from logging.handlers import BufferingHandler
from typing import Any

from gunicorn.config import Config
from gunicorn.glogging import Logger
from gunicorn.util import check_is_writable

from store.masking import escaped
from web.settings import is_json_log

_encode = json.JSONEncoder(default=str).encode


@lru_cache(maxsize=1)
def _format_time(second: int, format: str | None) -> str:
    return time.strftime(format or '%c', time.localtime(second))


class TextFormatter(logging.Formatter):
    """Escapes control characters, and formats the time once a second."""

    def formatTime(self, record: LogRecord, datefmt: str | None = None) -> str:
        return _format_time(int(record.created), datefmt)

    def format(self, record: LogRecord) -> str:
        return '\n'.join(map(escaped, super().format(record).split('\n')))


class JSONFormatter(logging.Formatter):
    """One JSON object a line, with the members of the mapping that a call logs."""

    def format(self, record: LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        # NOTE: the mapping of the access log has no ``message``, but the headers of the
        # request, and so its token: never write the members of that mapping.
        is_ours = isinstance(record.args, dict) and 'message' in record.args
        line: Any = {
            'time': when.isoformat(timespec='milliseconds').replace('+00:00', 'Z'),
            'level': record.levelname,
            'pid': record.process,
            'logger': record.name,
        }
        line |= record.args if is_ours else {'message': record.getMessage()}
        if record.exc_info:
            line['exception'] = self.formatException(record.exc_info)
        return escaped(_encode(line))  # JSON leaves DEL as it is


class Buffer(BufferingHandler):
    """Collects the lines of the service, and writes many with one system call.

    That saves 13 % of the processor time of an add. A worker sets ``flush_soon``, which
    has it call ``flush`` some milliseconds later. If it is killed the latest lines are
    lost; a warning or an error is written at once.
    """

    flush_soon: Callable[[], object] | None = None

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__(0)
        self._targets = targets

    def shouldFlush(self, record: LogRecord) -> bool:
        if self.flush_soon is None or record.levelno > logging.INFO:
            return True
        if len(self.buffer) == 1:
            self.flush_soon()
        return False

    def flush(self) -> None:
        with self.lock:  # type: ignore[union-attr]
            records, self.buffer = self.buffer, []
            for target in self._targets if records else ():
                try:
                    if isinstance(target, logging.StreamHandler):
                        lines = [f'{target.format(record)}\n' for record in records]
                        target.stream.write(''.join(lines))
                        target.flush()
                    else:
                        for record in records:
                            target.handle(record)
                except Exception:  # a full disk must not turn a 200 into a 500
                    target.handleError(records[0])


class PlantsLogger(Logger):  # type: ignore[misc]
    """gunicorn's log, also as JSON, with the service's own lines in it."""

    def setup(self, cfg: Config) -> None:
        super().setup(cfg)
        # Switches to save time: our lines show no thread, process name or source file.
        logging.logThreads = logging.logMultiprocessing = False
        logging._srcfile = None
        is_json = is_json_log(os.environ | cfg.env)  # gunicorn sets raw_env later
        if not (cfg.logconfig or cfg.logconfig_dict or cfg.logconfig_json):
            for log, form in (
                (self.error_log, self.error_fmt),
                (self.access_log, self.access_fmt),
            ):
                text = TextFormatter(form, self.datefmt)
                for handler in log.handlers:
                    handler.setFormatter(JSONFormatter() if is_json else text)
        self.buffer = Buffer(self.error_log.handlers)
        for name in ('plants', 'store'):  # all loggers of the service
            logger = logging.getLogger(name)
            logger.handlers = [self.buffer]
            logger.setLevel(self.error_log.level)
            logger.propagate = False

    def reopen_files(self) -> None:
        """Open the log files again; a failure must not end the server or a worker."""
        try:
            check_files(self.cfg)  # before one is closed
            super().reopen_files()
        except (OSError, RuntimeError) as ex:
            self.error('the log files were not opened again: %s', ex)


def check_files(cfg: Config) -> None:
    """Raise a ``RuntimeError`` if a log file cannot be opened."""
    for path in {cfg.errorlog, cfg.accesslog} - {'-', None}:
        check_is_writable(path)
