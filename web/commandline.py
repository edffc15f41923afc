"""What ``python app.py`` does: explain the service, or become gunicorn.

NOTE: this module reports that Python is too old or that packages are missing. So Python
3.7 must be able to read it, and at its top it imports only the standard library.
"""

import os
import sys
from importlib.util import find_spec

DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

USAGE = """\
usage: python app.py [--help | --version | OPTIONS]

Serve the plant store with gunicorn. OPTIONS are those of gunicorn:
python -m gunicorn --help lists them. The service reads environment variables:
"""


def main() -> None:
    """Explain the service or become gunicorn, or say why neither is possible."""
    obstacle = find_obstacle()
    if obstacle is not None:
        sys.exit(obstacle)
    if sys.argv[1:] in (['--help'], ['-h']):
        print(help_text())
    elif sys.argv[1:] in (['--version'], ['-v']):
        from store import __version__

        print(f'plant store {__version__}')
    else:
        command = [sys.executable, '-m', 'gunicorn', '--pythonpath', DIRECTORY]
        command += ['-c', os.path.join(DIRECTORY, 'gunicorn.conf.py')]
        os.execv(sys.executable, command + sys.argv[1:])


def find_obstacle():  # type: () -> str | None
    """Return a sentence that says why a start is impossible, or ``None``."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the older ones run this, too
        version = '{}.{}'.format(*sys.version_info)
        return f'Python 3.11 or newer is needed, this is {version}.'
    if sys.platform != 'linux':
        return f'Linux is needed, this is {sys.platform}.'
    for package in ('falcon', 'gunicorn', 'jsonschema'):
        if find_spec(package) is None:
            return (
                f'The package {package} is not installed. '
                f'Make the environment with "make venv", then run '
                f'{os.path.join(".venv", "bin", "python")} app.py.'
            )
    return None


def help_text() -> str:
    """Return the usage, and what each variable sets."""
    import textwrap

    from web.settings import VARIABLES

    lines = [USAGE]
    for name, meaning in VARIABLES.items():
        lines.append(f'  {name}')
        lines += textwrap.wrap(
            meaning, 80, initial_indent=' ' * 6, subsequent_indent=' ' * 6
        )
    return '\n'.join(lines)
