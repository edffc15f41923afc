"""The README names everything that a user can set, meet or type."""

import re
from pathlib import Path

import pytest

from app import create_app
from store import open_store
from web import openapi
from web.errors import ErrorValue
from web.settings import VARIABLES

TOP = Path(__file__).parent.parent
README = (TOP / 'README.md').read_text()
ROOMS = ['schemas', 'store', 'web']


def test_settings():
    """Each variable that the service knows has a row, and each row is known."""
    assert set(re.findall(r'^\| `(PLANTS_\w+)` \|', README, re.M)) == set(VARIABLES)


def test_error_values():
    """Each value has a row with its status and meaning, and each row is a value."""
    rows = re.findall(r'^\| (\d{5}) \| (\d{3}) \| (.*)', README, re.M)
    assert [(int(value), int(status)) for value, status, _ in rows] == [
        (int(value), value.status) for value in ErrorValue
    ]
    for value, (_, _, meaning) in zip(ErrorValue, rows, strict=True):
        assert meaning.replace('`', '').startswith(value.meaning)


def test_paths():
    """Each path that is described is in the README."""
    for path in openapi.describe({}, 1)['paths']:
        assert f'{path}`' in README


@pytest.mark.parametrize('target', ['run', 'test', 'lint', 'bench'])
def test_make_targets(target):
    """Each command of the Makefile that a user types is there and in the README."""
    assert f'`make {target}`' in README or f'$ make {target}' in README
    assert re.search(rf'^{target}: ', (TOP / 'Makefile').read_text(), re.M)


def test_embedding_example(tmp_path, monkeypatch):
    """The code for embedders runs as it is."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r'^```python\n(.*?)^```', README, re.M | re.S)
    names = {}
    exec(code, names)
    assert type(names['application']) is type(
        create_app(open_store('memory:'), tokens=['t'])
    )


def test_modules():
    """Each module that a reader is sent to exists, and none is left out."""
    named = set(re.findall(r'`(\w+\.py)`', README.partition('## Work on it')[2]))
    modules = {path.name for room in ROOMS for path in (TOP / room).glob('*.py')}
    assert modules - {'__init__.py'} <= named <= modules | {'app.py'}
