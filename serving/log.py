"""The log: gunicorn's, also as JSON, with the service's own lines in it."""

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from gunicorn.config import Config
from gunicorn.glogging import Logger, loggers

from store.masking import escaped
from web.settings import is_json_log

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


class Buffer(logging.Handler):
    """Collects the lines of the service, and writes many with one system call.

    That saves 13 % of the processor time of an add. A worker sets ``flush_soon``, which
    has it call ``flush`` some milliseconds later. If it is killed the latest lines are
    lost; a warning or an error is written at once.
    """

    flush_soon: Callable[[], object] | None = None

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._targets = targets
        self._records: deque[logging.LogRecord] = deque()  # of several threads
        self._waits = False

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        if self.flush_soon is None or record.levelno > logging.INFO:
            self.flush()
        elif not self._waits:
            self._waits = True
            self.flush_soon()

    def flush(self) -> None:
        self._waits = False  # first: what comes now may be too late for this call
        records = []
        while self._records:
            records.append(self._records.popleft())
        for target in self._targets if records else ():
            try:
                if isinstance(target, logging.StreamHandler):
                    lines = [f'{target.format(record)}\n' for record in records]
                    with target.lock:  # type: ignore[union-attr]
                        target.stream.write(''.join(lines))
                        target.flush()
                else:
                    for record in records:
                        target.handle(record)
            except Exception:  # a full disk must not turn a 200 into a 500
                target.handleError(records[0])


class PlantsLogger(Logger):  # type: ignore[misc]
    """gunicorn's log, also as JSON, with the service's own lines in it."""

    def atoms(self, *request: Any) -> dict[str, Any]:
        """Return the fields of the access log, escaped: a client chooses many."""
        atoms = super().atoms(*request).items()
        return {name: escaped(x) if isinstance(x, str) else x for name, x in atoms}

    def setup(self, cfg: Config) -> None:
        super().setup(cfg)
        # Switches to save time: our lines show no thread, process name or source file.
        logging.logThreads = logging.logMultiprocessing = False
        logging._srcfile = None
        is_json = is_json_log(os.environ | cfg.env)  # gunicorn sets raw_env later
        if not (cfg.logconfig or cfg.logconfig_dict or cfg.logconfig_json):
            text = TextFormatter(self.error_fmt, self.datefmt)
            for handler in self.error_log.handlers:
                handler.setFormatter(JSONFormatter() if is_json else text)
        for handler in self.access_log.handlers if is_json else ():
            handler.setFormatter(JSONFormatter())
        self.buffer = Buffer(self.error_log.handlers)
        for name in ('plants', 'store'):  # all loggers of the service
            logger = logging.getLogger(name)
            logger.handlers = [self.buffer]
            logger.setLevel(self.error_log.level)
            logger.propagate = False

    def reopen_files(self) -> None:
        """Open the log files again; go on with an old one where that fails.

        gunicorn's own method would end the server if the disk is full. Here the new
        file gets the old descriptor.
        """
        handlers = [each for logger in loggers() for each in logger.handlers]
        files = [x for x in handlers if isinstance(x, logging.FileHandler) and x.stream]
        opened: list[Any] = [(file.baseFilename, file.stream) for file in files]
        if self.logfile:  # --capture-output
            opened += [(self.logfile.name, each) for each in (sys.stdout, sys.stderr)]
        for path, stream in opened:
            try:
                with open(path, 'a') as new:
                    os.dup2(new.fileno(), stream.fileno(), stream.fileno() < 3)
            except OSError as ex:
                self.error_log.error('%s: could not be opened again: %s', path, ex)
