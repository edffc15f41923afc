"""Install packages into an environment, once, though several makes may ask at a time.

``python .ci/install.py STAMP REQUIREMENTS...`` installs the first file of requirements
into the directory of STAMP, and leaves that file, which is newer than all of them. The
environment is made anew, unless one of the files is a stamp in it.
"""

import fcntl
import os
import re
import subprocess
import sys
from ast import literal_eval

# How pip reaches packages: all that it takes of the settings of the user (PIP_... and
# pip.conf). Others may lead packages elsewhere, leave some out, or install nothing.
TAKEN = {
    *('index-url', 'extra-index-url', 'no-index', 'find-links', 'trusted-host'),
    *('proxy', 'cert', 'client-cert', 'keyring-provider', 'timeout', 'retries'),
}
# pip tries for more than a minute where no packet comes back.
PATIENCE = {'retries': '2', 'timeout': '10'}
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
            print('Another make installs packages: waiting for it.')
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(stamp):
            made = os.path.getmtime(stamp)
            if all(os.path.getmtime(file) <= made for file in files):
                return
        if not os.access('.', os.W_OK):
            sys.exit(f'{os.getcwd()} is read-only, so no .venv can be made in it')
        place, name = os.path.split(stamp)
        # What follows empties the directory: perhaps the argument is a wrong one.
        is_ours = os.path.exists(f'{place or "."}/pyvenv.cfg')
        if not (is_ours or (place and not os.path.exists(place))):
            sys.exit(f'{place or "."} is no environment: nothing is installed into it')
        print(f'Installing packages into {place}, once. It may take a minute or two.')
        # This removes the packages of earlier versions and of other Pythons.
        venv = [sys.executable, '-I', '-m', 'venv', '--clear', place]
        is_new = all(os.path.dirname(file) != place for file in files)
        if is_new and (code := subprocess.call(venv)):
            sys.exit(code)
        pip = [f'{place}/bin/python', '-I', '-m', 'pip', '--disable-pip-version-check']
        install = [*pip, 'install', '--quiet', '-r', files[0]]
        if subprocess.call(install, env=environment(pip)):
            sys.exit(OFFLINE % (files[0], name))
        with open(stamp, 'w'):
            pass


def environment(pip: list[str]) -> dict[str, str]:
    """Return the variables of pip: those of the user, but of its own only TAKEN."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}
    # Also where the settings choose another Python, or silence.
    command = [*pip, '--python', pip[0], '-vvv', 'config', 'list']
    listed = subprocess.check_output(command, env=variables, text=True)
    settings = dict(PATIENCE)
    for section in ('global', 'install', ':env:'):  # the last one counts
        for name, value in re.findall(rf'(?m)^{section}\.([a-z-]+)=(.*)$', listed):
            name = name.removeprefix('default-')
            if name in TAKEN:
                settings[name] = literal_eval(value)
    ours = {f'PIP_{k.replace("-", "_").upper()}': v for k, v in settings.items()}
    others = {k: v for k, v in variables.items() if not k.startswith('PIP_')}
    return {**others, **ours, 'PIP_CONFIG_FILE': os.devnull}


if __name__ == '__main__':
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
