"""Make the environment ``.venv`` once, though several makes ask for it at a time.

``python .ci/install.py STAMP REQUIREMENTS...`` installs the first file, and leaves the
file STAMP, which is newer than all of them.
"""

import fcntl
import os
import re
import subprocess
import sys

PIP = '.venv/bin/python', '-m', 'pip', '--disable-pip-version-check'
# pip tries for more than a minute where no packet comes back.
PATIENCE = {'PIP_RETRIES': '2', 'PIP_TIMEOUT': '10'}
OFFLINE = (
    'pip cannot get %s from %s. Without a network, install from a folder of wheels, '
    'which "pip download --only-binary :all: -d FOLDER -r %s" fills on a machine like '
    'this one: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make %s'
)


def main(stamp: str, *files: str) -> None:
    """Install the first file, unless another process does, or has done it."""
    # Not a file of its own: nothing is left, and a checkout may be read-only. The lock
    # ends with this process.
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
            sys.exit(
                f'{os.getcwd()} cannot be written to, so no .venv can be made in it'
            )
        print('Installing the packages into .venv, once. It may take a minute or two.')
        if files[0] == 'requirements.txt':
            # This removes the packages of earlier versions and of other Pythons.
            command = [sys.executable, '-m', 'venv', '--clear', '.venv']
            if code := subprocess.call(command):
                sys.exit(code)
        install(files[0], os.path.basename(stamp))
        with open(stamp, 'w'):
            pass


def install(file: str, target: str) -> None:
    """Install the packages of a file; exit with a sentence if pip cannot get them."""
    command = [*PIP, 'install', '--quiet', '-r', file]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, env=PATIENCE | os.environ
    )
    # With constraints pip calls a package that it does not find a conflict.
    words = r'(?:No matching distribution found for|Cannot install) (\S+)'
    if done.returncode and (missing := re.search(words, done.stderr)):
        sys.exit(OFFLINE % (missing[1], source(), file, target))
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.exit(done.returncode)


def source() -> str:
    """Return where pip looks for packages, without passwords."""
    listed = subprocess.check_output([*PIP, 'config', 'list'], text=True)
    found = dict(
        re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.M)
    )
    place = found.get('index-url', 'https://pypi.org/simple')
    if found.get('no-index', '').lower() in ('1', 'true', 'yes', 'on'):
        place = found.get('find-links', 'nowhere (no-index is set)')
    return re.sub('//[^/@]*@', '//', place)


if __name__ == '__main__':
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
