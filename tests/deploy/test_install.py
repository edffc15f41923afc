"""Installation from a checkout: the Makefile, the requirements, the version."""

import os
import re
import sys
import tomllib

import pytest
from server import REPOSITORY, TOKEN, Server, finished, request

from store import __version__

MAKE = ('make', '--no-print-directory', f'PYTHON={sys.executable}')


def text(name):
    """Return the text of a file of the repository."""
    return (REPOSITORY / name).read_text()


@pytest.fixture
def checkout(checkout):
    """A checkout in which no command was run yet."""
    for name in ('.ci', 'Makefile', 'requirements.txt', 'constraints.txt'):
        (checkout / name).symlink_to(REPOSITORY / name)
    return checkout


WRONG = [((3, 10), 'linux', '3.11'), ((3, 11), 'darwin', '3.12')]
WRONG += [((3, 12), 'win32', 'Linux or macOS')]


@pytest.mark.parametrize(('version', 'platform', 'needed'), WRONG)
def test_make_run_refuses_the_wrong_python(checkout, version, platform, needed):
    """A wrong Python ends make at once with a sentence; nothing is made."""
    python = checkout / 'python'
    told = f'import sys\nsys.version_info, sys.platform = {version}, {platform!r}'
    python.write_text(f'#!{sys.executable}\n{told}\nexec(sys.argv[2])\n')
    python.chmod(0o755)
    done = finished([*MAKE, 'run', f'PYTHON={python}'], cwd=checkout)
    assert done.returncode == 2
    sentence, _ = done.stderr.splitlines()  # the other line is from make
    assert needed in sentence
    assert not (checkout / '.venv').exists()


def test_make_run_installs_what_is_pinned_and_serves(checkout):
    """One command installs packages of which each is pinned, and serves."""
    if 'WHEELS' not in os.environ:
        pytest.skip('it needs the wheels of requirements.txt: see .ci/run')
    # Of these settings only those count that say where packages come from.
    (checkout / 'pip.conf').write_text('[install]\nno-deps = 1\nuser = 1\nquiet = 3\n')
    theirs = {'PIP_CONFIG_FILE': 'pip.conf', 'PIP_NO_INDEX': '1', 'PIP_DRY_RUN': '1'}
    theirs |= {'PIP_FIND_LINKS': os.environ['WHEELS'], 'PIP_PYTHON': '/nowhere'}
    theirs |= {'PIP_TARGET': str(checkout / 'elsewhere'), 'PYTHONWARNINGS': 'error'}
    command = [*MAKE, '.venv/run']
    finished(command, cwd=checkout, env=os.environ | theirs, check=True, timeout=300)
    with Server(checkout, command=(*MAKE, 'run')) as server:
        assert server.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
    listing = [checkout / '.venv/bin/pip', 'list', '--format=freeze']
    done = finished(listing, check=True, env=os.environ | {'PYTHONWARNINGS': 'ignore'})
    pinned = re.sub(r'\[\w+\]', '', text('constraints.txt'))
    for package, version in re.findall('(.+)==(.+)', done.stdout):
        name = re.sub(r'[-_.]+', '-', package).lower()
        assert name in ('pip', 'setuptools') or f'\n{name}=={version}' in pinned


# As a venv that is killed when it has removed what was there, and as locks of NFS are.
NEIGHBOURS = """import fcntl, os, subprocess
fcntl.flock = lambda file, how: how & fcntl.LOCK_EX and os.write(file.fileno(), b'')
def call(all, **_): return '--clear' in all and os.unlink('.venv/pyvenv.cfg') or CODE
subprocess.call, subprocess.check_output = call, lambda *_, **_how: ''
"""
STAMPS = [('--help', 1, 2), ('deploy/x', 1, 2), ('.venv/run', 9, 1), ('.venv/x', 0, 1)]


@pytest.mark.parametrize(('stamp', 'code', 'left'), STAMPS)
def test_environment_alone_is_emptied_and_remains_one(checkout, stamp, code, left):
    """A wrong argument names a directory with files; who kills make repeats it."""
    (checkout / 'requirements.txt').unlink()
    for name in 'requirements.txt', 'deploy/file', '.venv/pyvenv.cfg', '.venv/file':
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).touch()
        os.utime(checkout / name, (2e9, 2e9))  # the clock was ahead
    (checkout / 'sitecustomize.py').write_text(NEIGHBOURS.replace('CODE', str(code)))
    before = sorted(checkout.rglob('*'))
    command = [sys.executable, '-B', '.ci/install.py', stamp, 'requirements.txt']
    for _ in range(2):
        done = finished(command, cwd=checkout, env=os.environ | {'PYTHONPATH': '.'})
        assert done.returncode == code, done.stderr
        assert (sorted(checkout.rglob('*')) == before) == (code == 1)
    assert (len([*checkout.glob('*/file')]), 'once' in done.stdout) == (left, code == 9)


# Settings of gunicorn that our pages promise.
PROMISED = {'keepalive': '15', 'graceful_timeout': '30', 'worker_connections': '1000'}
PROMISED |= {'control_socket_disable': 'True'}


def test_make_run_serves_this_machine_alone(checkout):
    """Its settings are those of the pages; PORT chooses the port, on the loopback."""
    (checkout / '.venv/bin').mkdir(parents=True)
    (checkout / '.venv/bin/python').symlink_to(sys.executable)
    ours = {'PYTHONPATH': ':'.join(sys.path), 'PLANTS_TOKENS': TOKEN}
    ours |= {'GUNICORN_CMD_ARGS': '--print-config'}
    command = [*MAKE, '--old-file=.venv/run', 'run']
    for port in '', '9123':
        done = finished(command, cwd=checkout, env=os.environ | ours | {'PORT': port})
        shown = dict(re.findall(r'(\w+) += (.+)', done.stdout))
        promised = PROMISED | {'bind': f"['127.0.0.1:{port or 8000}']"}
        assert shown.items() >= promised.items(), done.stderr


def test_versions_are_the_same_everywhere():
    """Of the service, and of Python: in package data, image, pages and CI."""
    assert tomllib.loads(text('pyproject.toml'))['project']['version'] == __version__
    assert f'image.version="{__version__}"' in text('deploy/Containerfile')
    assert re.findall(r'(?m)^## (\S+)', text('CHANGELOG.md'))[0] == __version__
    [pinned] = re.findall(r'GUNICORN = .(\d\S+)\'', text('serving/lifecycle.py'))
    assert f'gunicorn[gevent]=={pinned}\n' in text('requirements.txt')
    *others, last = re.findall(r'Python :: (3\.\d+)', text('pyproject.toml'))
    assert f'with Python {", ".join(others)} and {last};' in text('README.md')
    assert f'python: {[*others, last]}' in text('.github/workflows/ci.yml')
