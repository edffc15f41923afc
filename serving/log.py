"""The log: gunicorn's, also as JSON, with the service's own lines in it."""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from gunicorn.config import Config
from gunicorn.glogging import Logger, loggers

from store.masking import escaped
from web.settings import is_json_log

BATCH_SECONDS = 0.005  # how long a line may wait for more lines

_encode = json.JSONEncoder(default=str).encode


@lru_cache(maxsize=1)
def _format_time(second: int, format: str) -> str:
    return time.strftime(format, time.localtime(second))


class TextFormatter(logging.Formatter):
    """Escapes control characters, and formats the time once a second."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _format_time(int(record.created), datefmt or Logger.datefmt)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if text.isprintable() else '\n'.join(map(escaped, text.split('\n')))


class JSONFormatter(logging.Formatter):
    """One JSON object a line, with the members of the mapping that a call logs."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            'time': when.isoformat(timespec='milliseconds').replace('+00:00', 'Z'),
            'level': record.levelname,
            'pid': record.process,
            'logger': record.name,
        }
        # NOTE: the mapping of the access log has no ``message``, but the headers of the
        # request, and so its token: never write the members of that mapping.
        if isinstance(record.args, dict) and 'message' in record.args:
            line.update(record.args)
        else:
            line['message'] = record.getMessage()
        if record.exc_info:
            line['exception'] = self.formatException(record.exc_info)
        return escaped(_encode(line))  # JSON leaves DEL as it is


class Assignment(str):
    """NAME=VALUE of ``--env``; its ``repr``, which gunicorn may log, hides VALUE."""

    def __repr__(self) -> str:
        return repr(re.sub('(?s)^[^=]*$|(?<==).*', '***', self, count=1))


class BatchingHandler(logging.Handler):
    """Collects lines for a few milliseconds; targets write them with one system call.

    A line takes 12 us in a batch, and 28 in the middle of a request. The lines of the
    last ``BATCH_SECONDS`` may be lost when a worker is killed.
    """

    def __init__(self, targets: Iterable[logging.Handler]) -> None:
        super().__init__()
        self._targets = list(targets)
        self._records: list[logging.LogRecord] = []
        self._thread = 0

    def batch_with(self, loop: Any) -> None:
        """Write the lines of this thread in batches, from a timer of an event loop."""
        self._loop = loop
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.get_ident() != self._thread:
            self._write([record])
        else:
            self._records.append(record)
            if len(self._records) == 1:
                # A new one: a timer of gevent fires at once when it is started again.
                self._timer = self._loop.timer(BATCH_SECONDS)
                self._timer.start(self.flush)

    def flush(self) -> None:
        records, self._records = self._records, []
        if records:
            self._write(records)

    def _write(self, records: list[logging.LogRecord]) -> None:
        for target in self._targets:
            try:
                if isinstance(target, logging.StreamHandler):
                    lines = [f'{target.format(record)}\n' for record in records]
                    with target.lock:  # type: ignore[union-attr]
                        target.stream.write(''.join(lines))
                        target.flush()
                else:
                    for record in records:
                        target.handle(record)
            except Exception:
                # A full disk must not turn a 200 into a 500.
                target.handleError(records[0])


class PlantsLogger(Logger):  # type: ignore[misc]
    """gunicorn's log, also as JSON, with the service's own lines in it."""

    def atoms(self, *request: Any) -> dict[str, Any]:
        """Return the fields of the access log, escaped: a client chooses many."""
        atoms = super().atoms(*request).items()
        return {name: escaped(x) if isinstance(x, str) else x for name, x in atoms}

    def setup(self, cfg: Config) -> None:
        super().setup(cfg)
        formatter: logging.Formatter | None = None
        is_ours = not (cfg.logconfig or cfg.logconfig_dict or cfg.logconfig_json)
        # Switches to save time: our lines show no thread, process name or source file.
        logging.logThreads = logging.logMultiprocessing = not is_ours
        logging._srcfile = None if is_ours else logging.__file__
        if is_ours:
            formatter = TextFormatter(self.error_fmt, self.datefmt)
        if is_json_log(os.environ | cfg.env):  # gunicorn sets --env later
            formatter = JSONFormatter()
            for handler in self.access_log.handlers:
                handler.setFormatter(formatter)
        for handler in self.error_log.handlers if formatter else ():
            if isinstance(handler, logging.StreamHandler):
                handler.setFormatter(formatter)
        self.batching = BatchingHandler(self.error_log.handlers)
        for name in ('plants', 'store'):  # all loggers of the service
            logger = logging.getLogger(name)
            logger.handlers = [self.batching]
            logger.setLevel(self.error_log.level)
            logger.propagate = False

    def reopen_files(self) -> None:
        """Open the log files again; go on with an old one where that fails.

        gunicorn's own method would end the server if the disk is full. Here the new
        file gets the old descriptor, for all that hold the stream (``wsgi.errors``).
        """
        handlers = [handler for logger in loggers() for handler in logger.handlers]
        files = [x for x in handlers if isinstance(x, logging.FileHandler) and x.stream]
        opened: list[Any] = [(file.baseFilename, file.stream) for file in files]
        if self.logfile:  # --capture-output
            streams = self.logfile, sys.stdout, sys.stderr
            opened += [(self.logfile.name, stream) for stream in streams]
        for path, stream in opened:
            try:
                with open(path, 'a') as new:
                    inherits = os.get_inheritable(stream.fileno())
                    os.dup2(new.fileno(), stream.fileno(), inherits)
            except OSError as ex:
                self.error_log.error('%s: could not be opened again: %s', path, ex)
