"""``python app.py``: what it explains, what it becomes, and what it needs."""

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
    """Return what the module sees of the interpreter, to be changed."""
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
    """Return the list of what the process became."""
    executed = []
    monkeypatch.setattr(
        commandline.os, 'execv', lambda path, command: executed.append((path, command))
    )
    return executed


def test_it_becomes_gunicorn_with_the_configuration_of_the_repository(
    interpreter, executed
):
    """Arguments are handed on to gunicorn, whatever the working directory is."""
    interpreter.argv += ['--bind', ':80']
    commandline.main()
    ((path, command),) = executed
    assert path == command[0] == '/venv/bin/python'
    assert command[1:3] == ['-m', 'gunicorn']
    assert command[command.index('--pythonpath') + 1] == str(REPOSITORY)
    assert command[command.index('-c') + 1] == str(REPOSITORY / 'gunicorn.conf.py')
    assert command[-2:] == ['--bind', ':80']


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_tells_every_variable(flag, interpreter, executed, capsys):
    """The help has what each variable sets, in lines that fit a terminal."""
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
def test_wrong_interpreter_is_told_in_a_sentence(
    attribute, value, sentence, interpreter, executed
):
    """An old Python and another system are refused before anything is imported."""
    setattr(interpreter, attribute, value)
    with pytest.raises(SystemExit) as raised:
        commandline.main()
    assert raised.value.code == sentence
    assert executed == []


def test_missing_package_is_told(interpreter, executed, monkeypatch):
    """The sentence names the package and how to make and use the environment."""
    specs = {'falcon': 'found'}
    monkeypatch.setattr(commandline, 'find_spec', specs.get)
    with pytest.raises(SystemExit, match=r'package gunicorn .*make venv.*\.venv/bin'):
        commandline.main()
    assert executed == []


def test_script_does_what_the_module_says(monkeypatch, capsys):
    """``python app.py`` ends when it has explained itself."""
    monkeypatch.setattr(sys, 'argv', ['app.py', '--version'])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(REPOSITORY / 'app.py'), run_name='__main__')
    assert not raised.value.code
    assert capsys.readouterr().out == f'plant store {__version__}\n'


def test_missing_environment_is_told_with_the_command_that_makes_it(tmp_path):
    """Outside the virtual environment no traceback ends the start, but a sentence."""
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
def test_old_python_can_parse_what_refuses_it(name):
    """A syntax error must not come before the sentence."""
    ast.parse((REPOSITORY / name).read_text(), feature_version=(3, 7))
