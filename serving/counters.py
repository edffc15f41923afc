"""The counters of all workers, for ``/metrics``: a directory that they share.

``prometheus_client`` keeps the values of each process in files named after the process,
and adds them up for each answer. Here workers are named by their numbers, not by their
process ids as usual: with process ids every reload would leave more files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from gunicorn.config import Config

from web.metrics import Processes

# Names the directory to prometheus_client and to the new master of an upgrade.
DIRECTORY_VARIABLE = 'PROMETHEUS_MULTIPROC_DIR'
DIRECTORY_PREFIX = 'plants-counters-'

# The name of this process.
_name = ''


def share(cfg: Config, name: str) -> Processes:
    """Make the directory, in memory and private to the serving user, before the fork.

    Both masters of an upgrade use one directory, so each worker reports all processes.

    Args:
        cfg: gunicorn's settings.
        name: The name of this process.
    """
    from prometheus_client import values

    global _name
    _name = name
    directory = _directory()
    if directory is None:
        directory = Path(
            tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=cfg.worker_tmp_dir)
        )
        os.chown(directory, cfg.uid, cfg.gid)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
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
    """Remove the gauges of a worker that has ended; its counters stay."""
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
    """Return the directory; ``None`` if there is none or somebody else's."""
    directory = Path(os.environ.get(DIRECTORY_VARIABLE, ''))
    is_ours = directory.name.startswith(DIRECTORY_PREFIX) and directory.is_dir()
    return directory if is_ours else None


def _pids(directory: Path) -> dict[str, int]:
    pids = {}
    for path in directory.glob('*.pid'):
        # The worker may just have ended, or not have written its process id yet.
        with suppress(FileNotFoundError, ValueError):
            pids[path.stem] = int(path.read_text())
    return pids
