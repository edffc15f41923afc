"""``python app.py``: help, version, missing requirements, the start of gunicorn."""

import ast
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from server import REPOSITORY

from store import __version__
from web import commandline
from web.settings import VARIABLES


@pytest.fixture
def interpreter(monkeypatch):
    """Return a stand-in for ``sys`` in the module, which a test can change."""
    interpreter = SimpleNamespace(
        version_info=sys.version_info,
        platform=sys.platform,
        executable='/venv/bin/python',
        argv=['app.py'],
        exit=sys.exit,
    )
    monkeypatch.setattr(commandline, 'sys', interpreter)
    return interpreter


@pytest.fixture
def executed(monkeypatch):
    """Return a list of the commands given to ``os.execv``."""
    executed = []
    monkeypatch.setattr(
        commandline.os, 'execv', lambda path, command: executed.append((path, command))
    )
    return executed


def test_gunicorn_is_run_with_the_configuration_of_the_repository(
    interpreter, executed
):
    """Arguments are passed to gunicorn, whatever the working directory is."""
    interpreter.argv += ['--bind', ':80']
    commandline.main()
    ((path, command),) = executed
    assert path == command[0] == '/venv/bin/python'
    assert command[1:3] == ['-m', 'gunicorn']
    assert command[command.index('--pythonpath') + 1] == str(REPOSITORY)
    assert command[command.index('-c') + 1] == str(REPOSITORY / 'gunicorn.conf.py')
    assert command[-2:] == ['--bind', ':80']


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_lists_every_variable(flag, interpreter, executed, capsys):
    """The help lists each variable, in lines that fit a terminal."""
    interpreter.argv.append(flag)
    commandline.main()
    lines = capsys.readouterr().out.splitlines()
    assert {f'  {name}' for name in VARIABLES} <= set(lines)
    assert max(map(len, lines)) <= 80
    assert executed == []


@pytest.mark.parametrize('flag', ['--version', '-v'])
def test_version_is_that_of_the_service(flag, interpreter, executed, capsys):
    """The version is ours, not gunicorn's."""
    interpreter.argv.append(flag)
    commandline.main()
    assert capsys.readouterr().out == f'plant store {__version__}\n'
    assert executed == []


@pytest.mark.parametrize(
    ('attribute', 'value', 'sentence'),
    [
        ('version_info', (3, 10, 13), 'Python 3.11 or newer is needed, this is 3.10.'),
        ('version_info', (2, 7, 18), 'Python 3.11 or newer is needed, this is 2.7.'),
        ('platform', 'darwin', 'Linux is needed, this is darwin.'),
    ],
)
def test_wrong_interpreter_is_refused_with_a_sentence(
    attribute, value, sentence, interpreter, executed
):
    """An old Python and another system are refused before anything is imported."""
    setattr(interpreter, attribute, value)
    with pytest.raises(SystemExit) as raised:
        commandline.main()
    assert raised.value.code == sentence
    assert executed == []


def test_missing_package_is_named(interpreter, executed, monkeypatch):
    """The message names the package, and how to make and use the environment."""
    specs = {'falcon': 'found'}
    monkeypatch.setattr(commandline, 'find_spec', specs.get)
    with pytest.raises(SystemExit, match=r'package gunicorn .*make venv.*\.venv/bin'):
        commandline.main()
    assert executed == []


def test_script_ends_after_its_version(monkeypatch, capsys):
    """``python app.py --version`` prints the version and ends."""
    monkeypatch.setattr(sys, 'argv', ['app.py', '--version'])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(REPOSITORY / 'app.py'), run_name='__main__')
    assert not raised.value.code
    assert capsys.readouterr().out == f'plant store {__version__}\n'


def test_missing_environment_is_refused_with_a_command(tmp_path):
    """Outside the virtual environment the start ends with a sentence, no traceback."""
    finished = subprocess.run(
        # -S: without the packages that are installed.
        [sys.executable, '-S', str(REPOSITORY / 'app.py')],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert line.startswith('The package falcon is not installed.')
    assert 'make venv' in line


@pytest.mark.parametrize('name', ['app.py', 'web/__init__.py', 'web/commandline.py'])
def test_old_python_can_parse_the_check_that_refuses_it(name):
    """An old Python must print the sentence, not a syntax error."""
    ast.parse((REPOSITORY / name).read_text(), feature_version=(3, 7))
