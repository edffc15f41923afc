"""Install packages into ``.venv``, once, though several makes may ask at a time.

``python .ci/install.py STAMP REQUIREMENTS...`` installs the first file of requirements,
and leaves the file STAMP, which is newer than all of them.
"""

import fcntl
import os
import subprocess
import sys

PIP = ('.venv/bin/python', '-m', 'pip', '--disable-pip-version-check', 'install')
# Settings of the user (PIP_TARGET, pip.conf) may say where packages come from, and not
# where they go.
HERE = ('--no-user', '--target=', '--root=/', f'--prefix={os.path.abspath(".venv")}')
# pip tries for more than a minute where no packet comes back.
PATIENCE = {'PIP_RETRIES': '2', 'PIP_TIMEOUT': '10'}
OFFLINE = (
    'Without a network, install from a folder of wheels, which "pip download '
    '--only-binary :all: -d FOLDER -r %s" fills on a machine like this one: '
    'PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make %s'
)


def main(stamp: str, *files: str) -> None:
    """Install the first file, unless another process does, or has done it."""
    # The lock is on a file that exists, because a checkout may be read-only.
    with open('requirements.txt') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print('Another make installs packages into .venv: waiting for it.')
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(stamp):
            made = os.path.getmtime(stamp)
            if all(os.path.getmtime(file) <= made for file in files):
                return
        if not os.access('.', os.W_OK):
            sys.exit(f'{os.getcwd()} is read-only, so no .venv can be made in it')
        print('Installing the packages into .venv, once. It may take a minute or two.')
        if files[0] == 'requirements.txt':
            # This removes the packages of earlier versions and of other Pythons.
            run(sys.executable, '-m', 'venv', '--clear', '.venv')
        if run(*PIP, *HERE, '--quiet', '-r', files[0], fatal=False):
            sys.exit(OFFLINE % (files[0], os.path.basename(stamp)))
        with open(stamp, 'w'):
            pass


def run(*command: str, fatal: bool = True) -> int:
    """Run a command; exit with its code if that is not 0 and ``fatal``."""
    code = subprocess.call(command, env=PATIENCE | os.environ)
    if code and fatal:
        sys.exit(code)
    return code


if __name__ == '__main__':
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
