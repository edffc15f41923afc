"""Settings of the environment, ``create_app``, ``app:app`` and importing."""

import re
import sys

import pytest
from exchange import OTHER, Client, assert_error
from rawclient import TOKEN
from server import REPOSITORY, finished
from test_contract import FERN

from app import get_app
from web.settings import VARIABLES, Settings

# Of each kind that a browser sends.
ORIGINS = 'https://xn--a-ecp.example:8443', 'http://[::1]:3000', 'moz-extension://0a1b'
ENVIRON = {
    'PLANTS_STORE': 'memory:',
    'PLANTS_TOKENS': f',, {TOKEN} , ,\t{OTHER}\n,',
    'PLANTS_MAX_BODY': '1000',
    'PLANTS_LOG': 'json',
    'PLANTS_METRICS_TOKEN': 'for-metrics',
    'PLANTS_CORS_ORIGINS': ', '.join(ORIGINS),
}


def test_each_variable_sets_a_field():
    """Each variable sets one field; white space around its value is removed."""
    environ = {name: f'\t{text} \r\n' for name, text in ENVIRON.items()}
    found = Settings.from_environ(environ)
    assert [*map(found.tokens.find, (TOKEN, OTHER))] == ['token-1', 'token-2']
    assert found == Settings('memory:', found.tokens, 1000, 'for-metrics', ORIGINS)
    assert not re.search('memory:|for-metrics', repr(found))


def test_unknown_variable_is_a_warning(caplog):
    """It names the variable and the nearest one, not its value, which may be secret."""
    environ = {'PLANTS_METRICS': TOKEN, 'PLANT_ID': '7', 'MY_PLANTS_LOG': 'x'}
    assert Settings.from_environ(environ) == Settings()
    [record] = caplog.records
    assert record.levelname == 'WARNING'
    assert re.search('PLANTS_METRICS:.*PLANTS_METRICS_TOKEN', caplog.text)
    assert TOKEN not in caplog.text


# A variable, what the message then says, and values that it does not accept.
REFUSED = [
    ('PLANTS_STORE', 'jsonl:', ['', 'redis://x', 'jsonl://plants.jsonl']),
    ('PLANTS_MAX_BODY', 'bytes', ['', '0', '-1', '64k', '1 0', '\u0661', '9' * 19]),
    ('PLANTS_MAX_BODY', 'bytes', ['68157450']),  # more than a line of a file may have
    ('PLANTS_LOG', 'text or json', ['', 'JSON', 'xml']),
    ('PLANTS_CORS_ORIGINS', 'https://', ['', 'a.example', 'https://A.example', 'null']),
    ('PLANTS_CORS_ORIGINS', 'https://', ['*,https://a.example', 'https://*.example']),
    ('PLANTS_CORS_ORIGINS', 'https://', ['https://a.example/', 'https://a.example\nx']),
    ('PLANTS_CORS_ORIGINS', 'https://', ['https://a.example:443', 'http://[::1]:80']),
    ('PLANTS_TOKENS', 'token', ['', ' , ', f'{TOKEN},garden {OTHER}', 'sha256:abc']),
    ('PLANTS_METRICS_TOKEN', 'token', ['', 'a b', 'é', f'sha256:{TOKEN}']),
    *[('PLANTS_TOKENS_FILE', path, [path]) for path in ('', '/', '/dev/null', 'a\0b')],
]
CASES = [(name, words, text) for name, words, texts in REFUSED for text in texts]


@pytest.mark.parametrize(('name', 'words', 'value'), CASES, ids=ascii)
def test_bad_variable_is_refused(name, words, value):
    """Each has a line, with the variable and what is accepted, and without a token."""
    assert {*VARIABLES} == {name for name, *_ in REFUSED}
    other = 'PLANTS_LOG' if name != 'PLANTS_LOG' else 'PLANTS_MAX_BODY'
    with pytest.raises(ValueError, match=r'^PLANTS_') as raised:
        Settings.from_environ({name: value, other: 'bad'})
    lines = dict(line.split(': ', 1) for line in str(raised.value).splitlines())
    assert lines.keys() == {name, other}
    assert words in lines[name]
    assert TOKEN not in lines[name]


def test_tokens_come_from_one_place_and_metrics_need_a_package(monkeypatch):
    """Both variables for tokens are refused, and metrics without their package."""
    monkeypatch.setitem(sys.modules, 'prometheus_client', None)
    both = {'PLANTS_TOKENS': TOKEN, 'PLANTS_TOKENS_FILE': '/nowhere'}
    for bad, words in (both, 'both'), ({'PLANTS_METRICS_TOKEN': 'x'}, 'prometheus-cli'):
        with pytest.raises(ValueError, match=words):
            Settings.from_environ(bad)


IMPORT = """
import logging, os, sys, threading
import app
assert threading.active_count() == 1
assert not logging.getLogger().handlers + logging.getLogger('plants').handlers
assert not sys.modules.keys() & {'gunicorn', 'gevent', 'prometheus_client'}
os.environ |= {'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS': 'token'}
from app import app as imported
assert imported is app.app
"""


def test_application_is_made_at_first_access(tmp_path):
    """An import has no side effect, and makes no application."""
    environment = {'PYTHONPATH': str(REPOSITORY), 'PLANTS_STORE': 'bad'}
    done = finished([sys.executable, '-c', IMPORT], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    assert list(tmp_path.iterdir()) == []


def test_get_app_follows_the_environment(capsys, caplog):
    """Store, tokens, limit; a token that it makes is printed once, and not logged."""
    client = Client(get_app(ENVIRON), OTHER)
    assert client.add(FERN).status_int == 200
    assert_error(client.send(b' ' * 1001), 40003)
    assert_error(client.get('/metrics'), 40101)
    assert capsys.readouterr() == ('', '')
    client = Client(get_app({'PLANTS_STORE': 'memory:'}))
    assert_error(client.add(FERN), 40100)
    output, errors = capsys.readouterr()
    # No proxy sees it, and no server what follows the #.
    [token] = re.findall(r"curl --noproxy '\*' .*Bearer ([0-9a-f]{32,})'", errors)
    assert f'Or open http://HOST:PORT/docs#token={token}\n' in errors
    assert client.add(FERN, authorization=f'Bearer {token}').status_int == 200
    assert (output, token in caplog.text) == ('', False)
