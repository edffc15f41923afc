"""What ``python app.py`` does: explain the service, or become gunicorn."""

import os
import sys
from importlib.util import find_spec

DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

USAGE = """\
usage: python app.py [--help | --version | OPTIONS]

Serve the plant store with gunicorn. OPTIONS are those of gunicorn:
python -m gunicorn --help lists them. The service reads environment variables;
the default is in brackets, and README.md has more about them:
"""


def main() -> None:
    """Explain the service or become gunicorn, or say that packages are missing."""
    if find_spec('gunicorn') is None:
        sys.exit('The packages are not installed for this Python: run "make run".')
    if sys.argv[1:] in (['--help'], ['-h']):
        from web.settings import VARIABLES

        print(USAGE)
        for name, meaning in VARIABLES.items():
            print(f'  {name}\n      {meaning}')
    elif sys.argv[1:] in (['--version'], ['-v']):
        from store import __version__

        print(f'plant store {__version__}')
    elif not os.environ.get('WEB_CONCURRENCY', '1').isdigit():
        # gunicorn itself ends with a traceback.
        sys.exit(f'WEB_CONCURRENCY: {os.environ["WEB_CONCURRENCY"]!r} is not a number')
    else:
        command = [sys.executable, '-m', 'gunicorn', '--pythonpath', DIRECTORY]
        command += ['-c', os.path.join(DIRECTORY, 'gunicorn.conf.py')]
        os.execv(sys.executable, command + sys.argv[1:])
