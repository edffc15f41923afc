"""Installation from a checkout: the Makefile, the requirements, the version, the CI."""

import fcntl
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from exchange import SECRET, table
from server import REPOSITORY, Server, finished, request

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


def wheels():
    """Return the paths of the wheels of requirements.txt; skip the test without."""
    if 'WHEELS' not in os.environ:
        pytest.skip('it needs the wheels of requirements.txt: see .ci/run')
    return sorted(Path(os.environ['WHEELS']).iterdir())


@pytest.mark.parametrize(
    ('version', 'platform', 'sentence'),
    [
        ((2, 7), 'linux2', 'Python 3.11 or newer is needed, this is 2.7'),
        ((3, 10), 'linux', 'Python 3.11 or newer is needed, this is 3.10'),
        ((3, 11), 'darwin', 'Python 3.12 or newer is needed on macOS, this is 3.11'),
        ((3, 12), 'win32', 'Linux or macOS is needed, this is win32'),
    ],
)
def test_make_run_refuses_the_wrong_python(checkout, version, platform, sentence):
    """A wrong or missing Python ends make at once with a reason; nothing is made."""
    done = finished([*MAKE, 'run', 'PYTHON=python3.99'], cwd=checkout)
    assert done.stderr.startswith('python3.99 was not found: install Python 3.11')
    python = checkout / 'python'
    python.write_text(
        f'#!{sys.executable}\n'
        'import sys\n'
        f'sys.version_info = {version}\n'
        f'sys.platform = {platform!r}\n'
        'exec(sys.argv[2])\n'
    )
    python.chmod(0o755)
    done = finished([*MAKE, 'run', f'PYTHON={python}'], cwd=checkout)
    assert done.returncode == 2
    assert done.stdout == ''
    assert done.stderr.splitlines()[0] == sentence
    assert len(done.stderr.splitlines()) == 2  # the other line is from make
    assert not (checkout / '.venv').exists()


def test_make_run_installs_what_runs_and_serves(checkout):
    """One command installs exactly requirements.txt with its needs, and serves."""
    needed = {normalized(wheel.name.split('-')[0]) for wheel in wheels()}
    offline = {
        'PIP_CONFIG_FILE': os.devnull,
        'PIP_FIND_LINKS': os.environ['WHEELS'],
        'PIP_NO_COMPILE': '1',
        'PIP_NO_INDEX': '1',
    }
    command = [*MAKE, '.venv/run']
    finished(command, cwd=checkout, env=os.environ | offline, check=True, timeout=300)
    with Server(checkout, command=(*MAKE, 'run')) as server:
        assert server.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
    done = finished([checkout / '.venv/bin/pip', 'list', '--format=json'], check=True)
    found = {normalized(package['name']) for package in json.loads(done.stdout)}
    assert found - {'pip', 'setuptools'} == needed
    assert not needed & {'flask', 'pytest'}


# Beside a Makefile it takes the place of Python's, which takes 4 s of CPU for pip.
QUICK_VENV = """
import os, pip, subprocess, sys, sysconfig
quick = [sys.executable, '-I', '-m', 'venv', '--without-pip', *sys.argv[1:]]
subprocess.run(quick, check=True)
packages = os.path.relpath(sysconfig.get_path('purelib'), sys.prefix)
os.symlink(os.path.dirname(pip.__file__), f'.venv/{packages}/pip')
"""


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """A checkout without packages, and what two makes at once have printed in it."""
    directory = tmp_path_factory.mktemp('made')
    for name in ('.ci', 'Makefile', 'constraints.txt'):
        (directory / name).symlink_to(REPOSITORY / name)
    (directory / 'requirements.txt').write_text('# no package\n')
    (directory / 'venv.py').write_text(QUICK_VENV)
    command = [*MAKE, '.venv/run']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    with (directory / 'requirements.txt').open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a third one, so that both must wait
        both = [subprocess.Popen(command, cwd=directory, **pipes) for _ in range(2)]
        waiting = [process.stdout.readline() for process in both]
    assert all('waiting for it' in line for line in waiting)
    printed = sorted(process.communicate(timeout=300)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    return directory, printed


def test_two_makes_install_once(made):
    """Of two makes at once in a fresh checkout, one waits for the other and says so."""
    directory, printed = made
    assert printed[0] == ''
    assert printed[1].startswith('Installing the packages into .venv, once.')
    assert (directory / '.venv/run').exists()


UNREACHABLE = {
    'index': (
        {'PIP_INDEX_URL': f'http://me:{SECRET}@127.0.0.1:1/simple', 'PIP_RETRIES': '0'},
        'from http://127.0.0.1:1/simple. ',
    ),
    'folder': ({'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': '/empty'}, 'from /empty. '),
}


@table('variables, words', UNREACHABLE)
def test_make_without_network_says_how_to_install(made, variables, words):
    """One sentence names the package, the place, and the way with a folder."""
    directory, _ = made
    (directory / 'requirements-test.txt').write_text('falcon==4.4.0\n')
    ours = {name: text for name, text in os.environ.items() if 'PIP_' not in name}
    ours |= variables | {'PIP_CONFIG_FILE': os.devnull}
    # Without the check whether gunicorn is there, which no requirement asks for.
    command = [*MAKE, '--old-file=.venv/works', '.venv/test']
    done = finished(command, cwd=directory, env=ours, timeout=300)
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(f'pip cannot get falcon==4.4.0 {words}Without a network')
    assert 'PIP_FIND_LINKS=FOLDER make test' in sentence
    assert len(rest) == 1  # from make
    assert SECRET not in done.stderr
    assert not (directory / '.venv/test').exists()


@pytest.mark.parametrize('target', ['run', 'test', 'lint'])
def test_environment_whose_python_is_gone_is_to_be_removed(checkout, target):
    """Without the Python that made ``.venv``, make says what to do."""
    (checkout / '.venv/bin').mkdir(parents=True)
    (checkout / '.venv/bin/python').symlink_to('/gone/python')
    (checkout / 'requirements-test.txt').touch()
    for stamp in ('run', 'test'):
        (checkout / '.venv' / stamp).touch()
    done = finished([*MAKE, target], cwd=checkout)
    assert done.returncode == 2
    assert 'rm -r .venv' in done.stderr.splitlines()[0]


def test_make_run_works_after_a_move_and_ignores_port(checkout):
    """The scripts of a moved environment fail; PORT does not open it to all."""
    environment = REPOSITORY / '.venv'
    if not environment.exists():
        pytest.skip('it needs the environment that make test has made')
    (checkout / '.venv/bin').mkdir(parents=True)
    for name in ('bin/python', 'pyvenv.cfg', 'lib'):  # without bin/gunicorn
        (checkout / '.venv' / name).symlink_to(environment / name)
    ours = {'PORT': '9123', 'PLANTS_TOKENS': 't', 'GUNICORN_CMD_ARGS': '--print-config'}
    command = [*MAKE, '--old-file=.venv/run', 'run']
    done = finished(command, cwd=checkout, env=os.environ | ours)
    # Printed as the address, or as one that is in use: a server may run beside.
    bound = re.findall(
        r'^(?:bind +=|Error: bind:) (.*:\d+)', done.stdout + done.stderr, re.MULTILINE
    )
    assert [address.strip("[']") for address in bound] == ['127.0.0.1:8000']


def test_pip_install_is_refused_with_a_sentence():
    """``pip install .`` says what to do instead, and installs nothing."""
    command = [sys.executable, '-m', 'pip', 'install', '--no-index', '--no-deps', '.']
    done = finished(command, cwd=REPOSITORY)
    assert done.returncode == 1
    assert 'The plant store is no package: ' in done.stderr


def normalized(name):
    """Return the normalized name of a package."""
    return re.sub(r'[-_.]+', '-', name).lower()


def pins(name):
    """Return the versions in a file of requirements, by package."""
    found = re.findall(
        r'^([\w.-]+)(?:\[\w+\])?==([\w.]+)(?: ;.*)?$', text(name), re.MULTILINE
    )
    return {normalized(package): version for package, version in found}


@pytest.mark.parametrize('name', ['requirements.txt', 'requirements-test.txt'])
def test_requirement_is_pinned_once(name):
    """Each line pins the version that constraints.txt pins, too."""
    lines = [x for x in text(name).splitlines() if x[0] not in '#-']
    assert len(lines) == len(pins(name))
    assert pins(name).items() <= pins('constraints.txt').items()


def test_wheel_is_pinned():
    """Every package that runs is pinned, also one that only another package needs."""
    for wheel in wheels():
        name, version, *_ = wheel.name.split('-')
        assert pins('constraints.txt')[normalized(name)] == version


def test_version_is_the_same_everywhere():
    """Package data, image, changelog and security policy name one version."""
    project = tomllib.loads(text('pyproject.toml'))['project']
    assert project['version'] == __version__
    assert f'image.version="{__version__}"' in text('deploy/Containerfile')
    [newest, *_] = re.findall(r'^## (\S+)', text('CHANGELOG.md'), re.MULTILINE)
    assert newest == __version__
    assert f'| {__version__.rpartition(".")[0]} | yes |' in text('SECURITY.md')
