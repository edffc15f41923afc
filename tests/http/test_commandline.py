"""``python app.py``: help, version, missing packages, the start of gunicorn."""

import sys

import pytest
from server import GUNICORN, REPOSITORY, finished

from store import __version__
from web import commandline
from web.settings import VARIABLES


def run(*arguments):
    """Run app.py in a child process; return its exit code, output and errors."""
    done = finished([sys.executable, *arguments], cwd='/')
    return done.returncode, done.stdout, done.stderr


APP = str(REPOSITORY / 'app.py')


def test_gunicorn_is_run_with_the_configuration_of_the_repository(monkeypatch):
    """Arguments are passed to gunicorn, whatever the working directory is."""
    executed = []
    monkeypatch.setattr(commandline.os, 'execv', lambda *call: executed.append(call))
    monkeypatch.setattr(sys, 'argv', ['app.py', '--bind', ':80'])
    commandline.main()
    assert executed == [(sys.executable, [*GUNICORN, '--bind', ':80'])]


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_lists_every_variable(flag, monkeypatch, capsys):
    """The help lists each variable, in lines that fit a terminal."""
    monkeypatch.delattr(commandline.os, 'execv')
    monkeypatch.setattr(sys, 'argv', ['app.py', flag])
    commandline.main()
    lines = capsys.readouterr().out.splitlines()
    assert {f'  {name}' for name in VARIABLES} <= set(lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize('flag', ['--version', '-v'])
def test_version_is_that_of_the_service(flag):
    """The version is ours, not gunicorn's."""
    assert run(APP, flag) == (0, f'plant store {__version__}\n', '')


def test_missing_environment_is_refused_with_a_command():
    """Outside the virtual environment the start ends with a sentence, no traceback."""
    sentence = 'The packages are not installed for this Python: run "make run".\n'
    # -S: without the packages that are installed.
    assert run('-S', APP) == (1, '', sentence)
