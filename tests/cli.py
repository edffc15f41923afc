"""The command line of the store in a process of its own."""

import contextlib
import os
import subprocess
import sys

from store.testing import TOP


@contextlib.contextmanager
def command(*arguments, **options):
    """Run a command in a process of its own, as a shell would run it."""
    environment = {
        name: text for name, text in os.environ.items() if name != 'PYTHONUNBUFFERED'
    }
    with subprocess.Popen(
        [sys.executable, '-m', 'store', *map(str, arguments)],
        cwd=TOP,
        env=environment,
        **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, **options},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def without_reader():
    """Return a pipe to write to that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer
