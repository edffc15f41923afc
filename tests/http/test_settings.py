"""Settings of the environment, ``create_app``, ``app:app`` and importing."""

import os
import re
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import OTHER, TOKEN, Client
from exchange import assert_error
from server import REPOSITORY, finished

import app
from app import create_app, get_app
from store import Plant
from store.memory import MemoryStore
from web.settings import VARIABLES, Settings

FERN = {'id': 1, 'name': 'Fern'}
# Of each kind that a browser sends.
ORIGINS = 'https://xn--a-ecp.example:8443', 'http://[::1]:3000', 'moz-extension://0a1b'


def test_defaults_are_a_file_and_no_token(tmp_path, monkeypatch):
    """The default is a file in the working directory, and no token."""
    monkeypatch.chdir(tmp_path)
    expected = Settings('jsonl:plants.jsonl', None, 65_536, False, ())
    assert Settings.from_environ({}) == expected
    assert list(tmp_path.iterdir()) == []


def test_each_variable_sets_a_field():
    """Each variable sets one field, of tokens between commas; others are ignored."""
    settings = Settings.from_environ(
        {
            'PLANTS_STORE': 'memory:',
            'PLANTS_TOKENS': f',, {TOKEN} , ,\t{OTHER}\n,',
            'PLANTS_MAX_BODY': '1000',
            'PLANTS_LOG': 'json',
            'PLANTS_METRICS': '1',
            'PLANTS_CORS_ORIGINS': ', '.join(ORIGINS),
            'PLANTS': 'x',
            'PLANT_ID': '7',
            'MY_PLANTS_STORE': 'x',
        }
    )
    assert settings.store == 'memory:'
    assert settings.max_body_bytes == 1000
    names = [settings.tokens.find(text).name for text in (TOKEN, OTHER)]
    assert (len(settings.tokens), names) == (2, ['token-1', 'token-2'])
    assert settings.metrics is True
    assert settings.cors_origins == ORIGINS
    default = vars(Settings())
    assert [name for name in default if vars(settings)[name] == default[name]] == []


def test_metrics_without_their_package_are_refused(monkeypatch):
    """The message names the package; without metrics it is not needed."""
    monkeypatch.setitem(sys.modules, 'prometheus_client', None)
    assert Settings.from_environ({'PLANTS_METRICS': '0'}).metrics is False
    with pytest.raises(ValueError, match=r'^PLANTS_METRICS: .* prometheus_client'):
        Settings.from_environ({'PLANTS_METRICS': '1'})


# A variable, what the message then says, and values that it does not accept.
NEAREST = 'there is no such setting; the nearest one is PLANTS_'
REFUSED = [
    ('PLANTS_TOKEN', f'{NEAREST}TOKENS', [TOKEN]),
    ('PLANT_STORE', f'{NEAREST}STORE', [TOKEN]),
    ('PLANTS_QQQQQQQQQQQQQQQQ', NEAREST, [TOKEN]),
    ('PLANTS_WORKER', 'use the options of gunicorn: -b HOST:PORT, -w WORKERS', [TOKEN]),
    ('PLANTS_STORE', 'jsonl:PATH', ['', 'Memory:', 'redis://x']),
    *[
        ('PLANTS_MAX_BODY', f'{text!r} is not a positive number of bytes', [text])
        for text in ['', '0', '-1', '64k', '1\n', '\u0661', '9' * 19, '6815745']
    ],
    ('PLANTS_LOG', "'' is not text or json", ['']),
    ('PLANTS_LOG', "'JSON ' is not text or json", ['JSON ']),
    ('PLANTS_METRICS', "'' is not 0 or 1", ['']),
    ('PLANTS_METRICS', "'true' is not 0 or 1", ['true']),
    *[
        ('PLANTS_CORS_ORIGINS', f'{text.split(",")[0]!r} is not an origin like', [text])
        for text in [
            *['', 'a.example', 'https://a.example/', 'https://A.example', 'null'],
            *['*,https://a.example', 'https://*.a.example', 'https://a.example\nx'],
            *['https://a.example:443', 'http://[::1]:80'],
        ]
    ],
    ('PLANTS_TOKENS', 'there is no token', ['', ' , ']),
    ('PLANTS_TOKENS', 'token-2: a token may have only', [f'{TOKEN},garden {OTHER}']),
    ('PLANTS_TOKENS', 'token-1: a digest is sha256: and 64', ['sha256:abc']),
    *[('PLANTS_TOKENS_FILE', path, [path]) for path in ('', '/', '/dev/null', 'a\0b')],
]


def test_each_variable_has_values_that_are_refused():
    """No variable accepts everything."""
    assert {*VARIABLES} <= {name for name, *_ in REFUSED}


@pytest.mark.parametrize(
    ('name', 'words', 'value'),
    [(name, words, text) for name, words, texts in REFUSED for text in texts],
    ids=ascii,
)
def test_bad_variable_is_refused(name, words, value):
    """The message has the variable and what is accepted, and shows no token."""
    with pytest.raises(ValueError, match=f'^{name}: ') as raised:
        Settings.from_environ({name: value})
    assert words in str(raised.value)
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize('listed', ['', TOKEN])
def test_both_token_variables_are_refused(listed):
    """Both variables for tokens are an error, even if one of them is empty."""
    environ = {'PLANTS_TOKENS': listed, 'PLANTS_TOKENS_FILE': '/etc/tokens'}
    with pytest.raises(ValueError, match=r'PLANTS_TOKENS.*PLANTS_TOKENS_FILE'):
        Settings.from_environ(environ)


@pytest.mark.parametrize('store', ['memory:', None, dict], ids=str)
def test_create_app_refuses_what_is_no_store(store):
    """A URL in place of a store is a TypeError that says what to use."""
    with pytest.raises(TypeError, match=r'^the store is a \w+, not a PlantStore: use'):
        create_app(store, tokens=TOKEN)


def test_two_applications_are_independent(serve, store):
    """Stores, tokens and limits belong to an application, not to the process."""
    first, second = serve(store), serve(MemoryStore(), tokens=OTHER, max_body_bytes=40)
    second.authorization = ('Bearer', OTHER)
    long = {'id': 1, 'name': 'x' * 40}
    assert first.add(long).status_int == 200
    assert_error(second.add(long), 40003)
    assert second.add(FERN).status_int == 200
    assert list(store) == [Plant(**long)]
    assert_error(first.add(FERN, authorization=f'Bearer {OTHER}'), 40101)


IMPORT = f"""
import logging, os, signal, sys, threading
handlers = [signal.getsignal(number) for number in signal.valid_signals()]

import app
assert not hasattr(app, 'application')
assert 'app' not in vars(app)
assert threading.active_count() == 1
assert not logging.getLogger().handlers
assert not logging.getLogger('plants').handlers
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert 'gunicorn' not in sys.modules

os.environ |= {{'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS': '{TOKEN}'}}
from app import app as imported
assert callable(imported)
assert imported is app.app
assert 'prometheus_client' not in sys.modules
"""


def test_application_is_made_at_first_access(tmp_path):
    """An import has no side effect; metrics alone need prometheus_client."""
    environment = {'PYTHONPATH': str(REPOSITORY), 'PLANTS_STORE': 'bad'}
    done = finished([sys.executable, '-c', IMPORT], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def at_exit(monkeypatch):
    """Return the list of the functions registered with ``atexit``."""
    registered = []
    monkeypatch.setattr(app.atexit, 'register', registered.append)
    return registered


def test_get_app_follows_the_environment(at_exit, capsys):
    """Store, tokens and limit are those of the environment; exits close the store."""
    environ = {'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS': f'{TOKEN},{OTHER}'}
    client = Client(get_app(environ | {'PLANTS_MAX_BODY': '100'}), TOKEN)
    assert client.add(FERN).status_int == 200
    assert client.add(FERN, authorization=f'Bearer {OTHER}').status_int == 200
    assert_error(client.send(b' ' * 101), 40003)
    assert capsys.readouterr() == ('', '')
    (close,) = at_exit
    close()
    assert 'the store is closed' in assert_error(client.add(FERN), 50300)


def test_token_is_made_and_shown_once(at_exit, capsys, caplog, monkeypatch):
    """Without a terminal a made token is in a file for its owner, as the log says."""
    monkeypatch.setattr(os, 'isatty', lambda fd: True)
    monkeypatch.setattr(os, 'dup', Mock(side_effect=OSError))
    client = Client(get_app({'PLANTS_STORE': 'memory:'}))
    assert_error(client.add(FERN), 40100)
    [path] = map(Path, re.findall(r'PLANTS_TOKENS=\$\(cat (.*)\)', caplog.text))
    token = path.read_text()
    assert stat.filemode(path.stat().st_mode) == '-rw-------'
    path.unlink()
    assert re.fullmatch('[0-9a-f]{64}', token), 'no option, nothing for a shell'
    assert client.add(FERN, authorization=f'Bearer {token}').status_int == 200
    assert token not in caplog.text
    assert capsys.readouterr() == ('', '')
