"""The log: gunicorn's, also as JSON, with the service's own lines in it."""

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from logging import LogRecord
from logging.handlers import MemoryHandler
from typing import Any

from gunicorn.config import Config
from gunicorn.glogging import Logger, loggers
from gunicorn.util import check_is_writable

from store.masking import escaped
from web.settings import is_set


class TextFormatter(logging.Formatter):
    """Escapes control characters."""

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
        return escaped(json.dumps(line, default=str))  # JSON leaves DEL as it is


def report(_: object = None) -> None:
    """Say why lines of the log are lost, without their arguments."""
    with suppress(OSError):
        print('Lines of the log are lost:', sys.exc_info()[1], file=sys.stderr)


class Buffer(MemoryHandler):
    """Writes many lines of the service to gunicorn's handlers with one system call.

    That saves 13 % of the processor time of an add. A worker raises the ``capacity``,
    and calls ``flush`` a few times a second; an error is written at once.
    """

    targets: Any = logging.getLogger('gunicorn.error')

    def flush(self) -> None:
        with self.lock:  # type: ignore[union-attr]
            records, self.buffer = self.buffer, []
            for target in self.targets.handlers if records else ():
                try:
                    lines = [f'{target.format(record)}\n' for record in records]
                    target.stream.write(''.join(lines))
                    target.flush()
                except OSError:  # a full disk must not turn a 200 into a 500
                    report()
                except Exception:  # of a broken one; nothing was written
                    for record in records:
                        target.handle(record)


class PlantsLogger(Logger):  # type: ignore[misc]
    """gunicorn's log, in our formats, with the lines of the service in it."""

    buffer = Buffer(1)

    def setup(self, cfg: Config) -> None:
        for path in {cfg.errorlog, cfg.accesslog} - {None, '-'}:
            check_is_writable(path)  # before the handlers of now are removed
        super().setup(cfg)
        # Of a lost line Python would show the arguments, and so the token of a request.
        logging.raiseExceptions = False
        # Switches to save time: our lines show no thread, process name or source file.
        logging.logThreads = logging.logMultiprocessing = False
        logging._srcfile = None
        # gunicorn sets the variables of ``raw_env`` later.
        is_json = is_set(os.environ | cfg.env, 'PLANTS_LOG', 'json')
        configured = cfg.logconfig or cfg.logconfig_dict or cfg.logconfig_json
        for handler in self.error_log.handlers + self.access_log.handlers:

            def emit(record: LogRecord, emit: Any = handler.emit) -> None:
                try:
                    emit(record)
                except Exception:  # a file cannot be opened
                    report()

            how = {'errors': 'backslashreplace'}  # any text can be written
            if not configured:  # or it keeps its encoding and its format
                how['encoding'] = 'utf-8'
                form = handler.formatter
                text = TextFormatter(form._fmt, form.datefmt)
                handler.setFormatter(JSONFormatter() if is_json else text)
            vars(handler).update(how, emit=emit, handleError=report)  # if reopened, too
            with suppress(AttributeError, OSError):  # syslog has none; it may be full
                handler.stream.reconfigure(**how)
        for name in ('plants', 'store'):  # all loggers of the service
            logger = logging.getLogger(name)
            logger.handlers = [self.buffer]
            if configured or cfg.syslog:  # these may rotate files, or want some lines
                logger.handlers = self.error_log.handlers
            logger.setLevel(self.error_log.level)
            logger.propagate = False

    def reopen_files(self) -> None:
        """Open the log files again; a failure must not end the server or a worker."""
        try:
            for handler in [each for log in loggers() for each in log.handlers]:
                if isinstance(handler, logging.FileHandler):
                    check_is_writable(handler.baseFilename)  # before one is closed
                    if self.cfg.uid != os.geteuid():  # the workers open it, too
                        os.chown(handler.baseFilename, self.cfg.uid, -1)
            super().reopen_files()
        except (OSError, RuntimeError) as ex:
            self.error('the log files were not opened again: %s', ex)
