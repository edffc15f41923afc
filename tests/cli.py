"""Run the command line of the store in a child process."""

import contextlib
import os
import subprocess
import sys

from server import REPOSITORY


@contextlib.contextmanager
def command(*arguments, **options):
    """Run a command in a child process, as a shell would; kill it at the end."""
    environment = {
        name: text for name, text in os.environ.items() if name != 'PYTHONUNBUFFERED'
    }
    with subprocess.Popen(
        [sys.executable, '-m', 'store', *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **options},
    ) as process:
        try:
            yield process
        finally:
            process.kill()
