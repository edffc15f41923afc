"""The counters of all workers, for ``/metrics``: a directory that they share.

``prometheus_client`` keeps the values of each process in files of its own, named after
the process, and adds them up when it is asked. Workers are named after their numbers,
and not after process ids as is usual, or every reload would leave more files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from gunicorn.config import Config

from web.metrics import Processes

# Where prometheus_client looks, and a new master of an upgrade.
VARIABLE = 'PROMETHEUS_MULTIPROC_DIR'
PREFIX = 'plants-counters-'

# Of this process.
_name = ''


def share(cfg: Config, name: str) -> Processes:
    """Make the directory, in memory and for us alone; call it before the fork.

    Both masters of an upgrade use one, so that each of their workers knows all.

    Args:
        cfg: gunicorn's settings.
        name: Of this process.
    """
    from prometheus_client import values

    global _name
    _name = name
    directory = _directory()
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=cfg.worker_tmp_dir))
        os.chown(directory, cfg.uid, cfg.gid)
        os.environ[VARIABLE] = str(directory)
    value_class = values.MultiProcessValue(lambda: _name)  # type: ignore[no-untyped-call]
    values.ValueClass = value_class
    return Processes(str(directory), lambda: _pids(directory))


def join(name: str) -> None:
    """Count under a name from now on, in a worker that has just been forked."""
    global _name
    _name = name
    directory = _directory()
    if directory is not None:
        (directory / f'{name}.pid').write_text(str(os.getpid()))


def leave(name: str) -> None:
    """Forget what a worker that has ended was doing; what it has counted stays."""
    directory = _directory()
    if directory is not None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(name, str(directory))  # type: ignore[no-untyped-call]
        (directory / f'{name}.pid').unlink(missing_ok=True)


def remove() -> None:
    """Remove the directory."""
    directory = _directory()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _directory() -> Path | None:
    """Return the directory, unless it is none or one that we have not made."""
    directory = Path(os.environ.get(VARIABLE, ''))
    is_ours = directory.name.startswith(PREFIX) and directory.is_dir()
    return directory if is_ours else None


def _pids(directory: Path) -> dict[str, int]:
    pids = {}
    for path in directory.glob('*.pid'):
        # The worker may have ended since, or be about to write its number.
        with suppress(FileNotFoundError, ValueError):
            pids[path.stem] = int(path.read_text())
    return pids
