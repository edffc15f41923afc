"""Install packages into an environment, once, though several makes may ask at a time.

``python .ci/install.py STAMP REQUIREMENTS...`` installs the first file of requirements
into the directory of STAMP, and leaves that file, which is newer than all of them. The
environment is made anew, unless one of the files is a stamp in it.
"""

import fcntl
import os
import re
import shutil
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
    # The lock is on a file that exists, because a checkout may be read-only. NFS gives
    # one that excludes others only for a file that is open for writing.
    mode = 'r+' if os.access('requirements.txt', os.W_OK) else 'r'
    how = fcntl.LOCK_EX if os.access('.', os.W_OK) else fcntl.LOCK_SH
    with open('requirements.txt', mode) as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            print('Another make installs packages: waiting for it.')
            fcntl.flock(lock, how)
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
        if all(os.path.dirname(file) != place for file in files):
            empty(place)  # of packages of earlier versions and of other Pythons
            if code := subprocess.call([sys.executable, '-I', '-m', 'venv', place]):
                sys.exit(code)
        pip = [f'{place}/bin/python', '-I', '-m', 'pip', '--disable-pip-version-check']
        install = [*pip, 'install', '--quiet', '-r', files[0]]
        if subprocess.call(install, env=environment(pip)):
            sys.exit(OFFLINE % (files[0], name))
        with open(stamp, 'w'):
            pass
        # Where a file is of the future, a stamp of now would never be newer, and each
        # command would empty the environment, also under a server that runs.
        times = [os.stat(path).st_mtime_ns for path in (stamp, *files)]
        os.utime(stamp, ns=(max(times), max(times)))


def empty(place: str) -> None:
    """Empty an environment, but for what says that it is one: a kill may come.

    ``venv --clear`` removes that as well, perhaps seconds before it makes another.
    """
    os.makedirs(place, exist_ok=True)
    with open(f'{place}/pyvenv.cfg', 'a'):
        pass
    for entry in [*os.scandir(place)]:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        elif entry.name != 'pyvenv.cfg':
            os.unlink(entry)


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
    except subprocess.CalledProcessError as ex:  # pip has said which setting is wrong
        sys.exit(ex.returncode)
