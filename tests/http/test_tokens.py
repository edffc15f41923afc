"""Bearer tokens: which are accepted, for what, and the tokens file."""

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchange import assert_error, table
from rawclient import TOKEN
from test_contract import FERN
from wsgiclient import OTHER, Client

from app import create_app
from store.memory import MemoryStore
from web.tokens import Tokens, TokensFile


def sha256(token):
    """Return the ``sha256:`` entry of a token."""
    return f'sha256:{hashlib.sha256(token.encode()).hexdigest()}'


def assert_shows_no_token(text):
    """Check that a text has neither a token nor the digest of one."""
    for secret in (TOKEN, OTHER, sha256(OTHER)[7:-1]):
        assert secret not in text


@pytest.fixture
def path(tmp_path):
    """Return a tokens file with one token."""
    path = tmp_path / 'tokens'
    path.write_text(f'old {TOKEN}\n')
    return path


@pytest.fixture
def always_checked(monkeypatch):
    """Look at the tokens file at every request."""
    monkeypatch.setattr(TokensFile, 'CHECK_EVERY', 0)


def serve_tokens(tokens, **options):
    """Return a client, without a token, of a service that accepts these tokens."""
    return Client(create_app(MemoryStore(), tokens=tokens, **options))


def value_of(client, authorization, path='/plants'):
    """Return the error value of a request with an Authorization header, or 0."""
    method = 'GET' if path == '/metrics' else 'POST'
    response = client.add(FERN, path=path, method=method, authorization=authorization)
    if response.status_int == 200:
        return 0
    assert_shows_no_token(assert_error(response, response.json['error']))
    return response.json['error']


BAD_TOKENS = ['', f'{OTHER}\n', f'garden {OTHER}', f'"{OTHER}"', f'{OTHER}é']
BAD_TOKENS += [f'{OTHER}=x', f'name:{OTHER}', sha256(OTHER)[:-1], f'{sha256(OTHER)}00']


@pytest.mark.parametrize('bad', BAD_TOKENS, ids=ascii)
def test_bad_token_is_refused_by_its_name(bad):
    """A bad token is refused by its name; it is never shown, cut, or ignored."""
    for tokens, where in [([TOKEN, bad], 'token-2'), ({'garden': bad}, 'garden')]:
        with pytest.raises(ValueError, match=f'^{where}: ') as raised:
            serve_tokens(tokens)
        assert_shows_no_token(str(raised.value))


@pytest.mark.parametrize('tokens', [None, [], {}, ''], ids=ascii)
def test_no_application_is_made_without_a_token(tokens):
    """The service never runs open; None may be a variable that is not set."""
    with pytest.raises(ValueError, match='token'):
        create_app(MemoryStore(), tokens=tokens)


# Tokens as an argument, and as lines of a file; then the names of those accepted.
ARGUMENTS = [
    (sha256(TOKEN), {TOKEN: 'token-1'}),
    ([TOKEN, sha256(OTHER), 'x/=='], {OTHER: 'token-2', 'x/==': 'token-3'}),
    ({'garden': TOKEN, 'shed': sha256(OTHER)}, {TOKEN: 'garden', OTHER: 'shed'}),
]
LINES = [
    (f'  {TOKEN}\t', {TOKEN: 'token-1'}),
    (f'a {TOKEN}\na {OTHER}', {TOKEN: 'a', OTHER: 'a'}),
    (f'{TOKEN}\nb {sha256(TOKEN).swapcase().replace("SHA", "sha")}', {TOKEN: 'b'}),
    (f'#\n#a {OTHER}\na#b {TOKEN} # mine', {TOKEN: 'a#b'}),
    (f'\ufeffa {TOKEN}\r\n\r\nb {OTHER}\r', {TOKEN: 'a', OTHER: 'b'}),
]


def assert_accepts(tokens, names):
    """Check that exactly these tokens are accepted, under these names."""
    assert {text: tokens.find(text) for text in names} == names
    for text in ('', 'token', 'garden', sha256(TOKEN), f' {TOKEN}', TOKEN.upper()):
        assert tokens.find(text) is None


@pytest.mark.parametrize(('tokens', 'names'), ARGUMENTS, ids=ascii)
def test_tokens_are_named_by_number_or_mapping(tokens, names):
    """Tokens or their digests are named by number, or by the keys of a mapping."""
    assert_accepts(Tokens(tokens), names)


@pytest.mark.parametrize(('text', 'names'), LINES, ids=ascii)
def test_line_of_a_tokens_file_is_read(text, names, path):
    """A line is a token or its digest, with or without a name."""
    path.write_bytes(text.encode())
    assert_accepts(TokensFile(path), names)


# The scheme may be in any case, with any number of spaces after it.
ACCEPTED = [f'Bearer {TOKEN}', f'bearer {TOKEN}', f'BEARER   {TOKEN} ']
NO_BEARER_TOKEN = [None, '', 'Bearer  ', TOKEN, f'Basic {TOKEN}', f'Bearer:{TOKEN}']
NO_BEARER_TOKEN += [f'Basic YTpi, Bearer {TOKEN}']
WRONG_TOKENS = ['wrong', TOKEN[:-1], OTHER, TOKEN.upper(), f'"{TOKEN}"', f'{TOKEN} x']
WRONG_TOKENS += [f'garden {TOKEN}', 'garden', sha256(TOKEN), '\xe9\xff', f'{TOKEN}\xa0']
WRONG_TOKENS += ['x' * 100_000]


def test_authorization_needs_a_bearer_token_of_ours():
    """No bearer token is 40100, and one that is not exactly one of ours 40101."""
    client = serve_tokens({'garden': TOKEN})
    for header in ACCEPTED:
        assert value_of(client, header) == 0
    for header in NO_BEARER_TOKEN:
        assert value_of(client, header) == 40100, header
    for token in WRONG_TOKENS:
        assert value_of(client, f'Bearer {token}') == 40101, token


@pytest.mark.parametrize('form', [str, sha256], ids=['token', 'digest'])
def test_metrics_token_reads_metrics_and_nothing_else(form):
    """Only that token reads metrics, and it is 40101 everywhere else."""
    client = serve_tokens(TOKEN, metrics_token=form(OTHER))
    ours = f'Bearer {OTHER}'
    assert value_of(client, ours, '/metrics') == 0
    assert_error(client.add(FERN, path='/metrics', authorization=ours), 40500)
    assert value_of(client, f'Bearer {TOKEN}', '/metrics') == 40101
    assert value_of(client, None, '/metrics') == 40100
    for path in ('/plants', '/nowhere', '/', '/metrics2', '/metrics/', '/Metrics'):
        assert value_of(client, ours, path) == 40101
    assert value_of(serve_tokens(TOKEN), f'Bearer {TOKEN}', '/metrics') == 40400


def test_metrics_token_is_none_for_plants(path, always_checked, caplog):
    """The same token for both is refused, also when the tokens file changes later."""
    with pytest.raises(ValueError, match=r'garden.*PLANTS_METRICS') as raised:
        serve_tokens({'a': TOKEN, 'garden': OTHER}, metrics_token=sha256(OTHER))
    client = serve_tokens(TokensFile(path), metrics_token=OTHER)
    path.write_text(f'new {TOKEN[::-1]}\nshop {sha256(OTHER)}\n')
    assert value_of(client, f'Bearer {OTHER}') == 40101
    assert value_of(client, f'Bearer {TOKEN}') == 0
    assert [line.levelname for line in caplog.records if 'shop' in line.message]
    assert_shows_no_token(str(raised.value) + caplog.text)


def test_tokens_file_is_looked_at_once_a_second(path, monkeypatch):
    """A change is taken up then, also one that came while the file was read."""
    now, read = 0, Path.read_bytes
    monkeypatch.setattr('web.tokens.time', SimpleNamespace(monotonic=lambda: now))

    def read_before_a_change(path):
        text = read(path)
        path.write_text('a' * (now + 1))
        os.utime(path, (0, 0))  # as a copy that keeps the time
        return text

    monkeypatch.setattr(Path, 'read_bytes', read_before_a_change)
    tokens = TokensFile(path)
    for now in 1, 2:
        assert tokens.find('a' * now)
        assert tokens.find('a' * now + 'a') is None


def replaced(text):
    """Return a function that replaces the tokens file by one with a text."""
    return lambda path: path.write_text(text, 'latin-1')


# What is done to the file, and what the message says then.
DAMAGE = {
    'removed': (lambda path: path.unlink(), ''),
    'a FIFO': (lambda path: (path.unlink(), os.mkfifo(path)), 'not a regular file'),
    'empty': (replaced(''), 'no token'),
    'not UTF-8': (replaced(f'{OTHER}\n\xff\n'), ''),
    'bad token': (replaced(f'{OTHER}\n\n# comment\nb "{OTHER}"\n'), 'line 4'),
    'of version 1': (replaced(f'a {OTHER} metrics'), 'line 1.*PLANTS_METRICS_TOKEN'),
}


@table('damage, message', DAMAGE)
def test_broken_tokens_file_keeps_the_old_tokens(
    damage, message, path, always_checked, caplog
):
    """A tokens file that cannot be used changes nothing; it is logged and counted."""
    client = serve_tokens(TokensFile(path), metrics_token='for-metrics')
    damage(path)
    with pytest.raises(ValueError, match=f'{path}: .*{message}') as raised:
        TokensFile(path)
    for _ in range(3):
        assert value_of(client, f'Bearer {TOKEN}') == 0
        assert value_of(client, f'Bearer {OTHER}') == 40101
    [record] = caplog.records
    assert record.levelname == 'ERROR'
    assert str(raised.value) in record.message
    whole = path.with_name('whole')
    whole.write_text(f'new {OTHER}\n')
    whole.rename(path)
    assert value_of(client, f'Bearer {OTHER}') == 0
    assert value_of(client, f'Bearer {TOKEN}') == 40101
    assert_shows_no_token(caplog.text)
    metrics = client.get('/metrics', headers={'Authorization': 'Bearer for-metrics'})
    assert 'plants_token_reload_failures_total 1.0\n' in metrics.text


def test_application_needs_a_store():
    """A URL in place of a store is refused at once, and not shown."""
    with pytest.raises(TypeError) as caught:
        create_app(f'postgresql://u:{TOKEN}@host/plants', tokens=TOKEN)
    assert TOKEN not in str(caught.value)
