"""Bearer tokens: which are accepted, what each may do, and the tokens file."""

import hashlib
import hmac
import logging
import os
import threading
from unittest import mock

import pytest
from conftest import OTHER, TOKEN, Client
from exchange import assert_error
from server import wait_until
from waiting import PATIENCE

from app import create_app
from store.memory import MemoryStore
from web import tokens as tokens_module
from web.tokens import Token, Tokens, TokensFile

FERN = {'id': 1, 'name': 'Fern'}
WITHIN = TokensFile.CHECK_EVERY + TokensFile.CHECK_WITHIN  # seconds


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


def serve_tokens(tokens, **options):
    """Return a client, without a token, of a service that accepts these tokens."""
    return Client(create_app(MemoryStore(), tokens=tokens, **options))


def value_of(client, authorization, path='/plants'):
    """Return the error value of a request with an Authorization header, or 200."""
    if path == '/plants':
        response = client.add(FERN, authorization=authorization)
    else:
        response = client.get(path, headers={'Authorization': authorization})
    if response.status_int == 200:
        return 200
    assert_shows_no_token(assert_error(response, response.json['error']))
    return response.json['error']


BAD_TOKENS = [
    *['', f'{OTHER}\n', f'garden {OTHER}', f'"{OTHER}"', f'{OTHER}é', f'{OTHER}=x'],
    *[f'name:{OTHER}', sha256(OTHER)[:-1], sha256(OTHER)[:-1] + 'g', None, b'abc'],
    f'{sha256(OTHER)}00',
]


@pytest.mark.parametrize('bad', BAD_TOKENS, ids=ascii)
def test_bad_token_is_refused_by_its_name(bad):
    """A bad token is refused by its name; it is never shown, cut, or ignored."""
    for tokens, where in [([TOKEN, bad], 'token-2'), ({'garden': bad}, 'garden')]:
        with pytest.raises(ValueError, match=f'^{where}: ') as raised:
            serve_tokens(tokens)
        assert_shows_no_token(str(raised.value))


BREAK_A_LOG_LINE = [{name: TOKEN} for name in ('a\nb', 'a\x1b[2Jb', '\u2028')]


@pytest.mark.parametrize('tokens', [None, [], {}, '', *BREAK_A_LOG_LINE], ids=ascii)
def test_no_application_is_made_without_a_token_and_a_printable_name(tokens):
    """The service never runs open; None may be a variable that is not set."""
    with pytest.raises(ValueError, match='token'):
        create_app(MemoryStore(), tokens=tokens)


def assert_accepts(tokens, names):
    """Check that exactly these tokens are accepted, under these names."""
    assert len(tokens) == len(names)
    assert {text: tokens.find(text).name for text in names} == names
    for text in ('', 'token', 'garden', sha256(TOKEN), f' {TOKEN}', TOKEN.upper()):
        assert tokens.find(text) is None


@pytest.mark.parametrize(
    ('tokens', 'names'),
    [
        (TOKEN, {TOKEN: 'token-1'}),
        (sha256(TOKEN), {TOKEN: 'token-1'}),
        (iter([TOKEN, sha256(OTHER)]), {TOKEN: 'token-1', OTHER: 'token-2'}),
        ({'garden': TOKEN, 'shed': sha256(OTHER)}, {TOKEN: 'garden', OTHER: 'shed'}),
        ({'a': TOKEN, 'b': TOKEN}, {TOKEN: 'b'}),
        ({'the # garden': TOKEN, '': OTHER}, {TOKEN: 'the # garden', OTHER: ''}),
        (['-._~+/=='], {'-._~+/==': 'token-1'}),
    ],
    ids=['text', 'digest', 'iterator', 'mapping', 'twice', 'odd names', 'characters'],
)
def test_tokens_are_named_by_number_or_mapping(tokens, names):
    """Tokens or their digests are named by number, or by the keys of a mapping."""
    assert_accepts(Tokens(tokens), names)


# The scheme may be in any case, with any number of spaces after it.
ACCEPTED = [f'Bearer {TOKEN}', f'bearer {TOKEN}', f'BEARER   {TOKEN} ']
NO_BEARER_TOKEN = [
    *[None, '', 'Bearer  ', TOKEN, f'Basic {TOKEN}', f'Bearer:{TOKEN}'],
    f'Basic YTpi, Bearer {TOKEN}',
]
WRONG_TOKENS = [
    *['wrong', TOKEN[:-1], OTHER, TOKEN.upper(), f'"{TOKEN}"', f'{TOKEN} x'],
    *[f'garden {TOKEN}', 'garden', sha256(TOKEN), '\xe9\xff', 'x' * 100_000],
    f'{TOKEN}\xa0',
]


@pytest.mark.parametrize(
    ('value', 'authorization'),
    [
        *[(200, header) for header in ACCEPTED],
        *[(40100, header) for header in NO_BEARER_TOKEN],
        *[(40101, f'Bearer {token}') for token in WRONG_TOKENS],
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_authorization_needs_a_bearer_token_of_ours(value, authorization):
    """No bearer token is 40100, and one that is not exactly one of ours 40101."""
    assert value_of(serve_tokens({'garden': TOKEN}), authorization) == value


def test_time_of_a_comparison_tells_nothing(monkeypatch):
    """Every digest is compared in constant time, also after the right one."""
    compare = mock.Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr('hmac.compare_digest', compare)
    tokens = Tokens(['first', 'second', 'third'])
    for text in ('first', 'unknown'):
        tokens.find(text)
    assert compare.call_count == 6


def test_metrics_token_reads_metrics_and_nothing_else(path):
    """Once a token is for metrics, only that reads them, and it is 40300 elsewhere."""
    path.write_text(f'shop {TOKEN}\n')
    client = serve_tokens(TokensFile(path), metrics=True)
    assert value_of(client, f'Bearer {TOKEN}', '/metrics') == 200
    path.write_text(f'shop {TOKEN}\nprometheus {sha256(OTHER)} metrics  # scrapes\n')
    client = serve_tokens(TokensFile(path), metrics=True)
    assert value_of(client, f'Bearer {TOKEN}', '/metrics') == 40300
    assert value_of(client, f'Bearer {TOKEN}') == 200
    assert value_of(client, f'Bearer {OTHER}', '/metrics') == 200
    for other_path in ('/plants', '/nowhere', '/', '/metrics2'):
        assert value_of(client, f'Bearer {OTHER}', other_path) == 40300
    refused = client.add(FERN, authorization=f'Bearer {OTHER}')
    challenge = 'Bearer error="insufficient_scope", scope="plants"'
    assert refused.headers['WWW-Authenticate'] == challenge


@pytest.mark.parametrize(
    ('lines', 'names'),
    [
        ([f'  {TOKEN}\t'], {TOKEN: 'token-1'}),
        ([f'garden\t {TOKEN}'], {TOKEN: 'garden'}),
        ([f'garden {sha256(TOKEN)}'], {TOKEN: 'garden'}),
        ([f'sha256:{sha256(TOKEN)[7:].upper()}'], {TOKEN: 'token-1'}),
        ([f'a {TOKEN}', f'a {OTHER}'], {TOKEN: 'a', OTHER: 'a'}),
        ([TOKEN, f'b {sha256(TOKEN)}'], {TOKEN: 'b'}),
        (['#', f'#a {OTHER}', f'a#b {TOKEN}'], {TOKEN: 'a#b'}),
        (['', '# comment', f'{TOKEN} # mine'], {TOKEN: 'token-3'}),
        (['metrics metrics'], {'metrics': 'metrics'}),
        (['x' * 10_000], {'x' * 10_000: 'token-1'}),
        # of another editor
        ([f'\ufeffa {TOKEN}\r', '\r', f'b {OTHER}'], {TOKEN: 'a', OTHER: 'b'}),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_line_of_a_tokens_file_is_read(lines, names, path):
    """A line is a token or its digest, with or without a name."""
    path.write_bytes('\n'.join(lines).encode())
    assert_accepts(TokensFile(path), names)


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        (f'one two {OTHER}', 'not TOKEN, NAME TOKEN or NAME TOKEN metrics'),
        (f'one {OTHER} Metrics', 'not TOKEN, NAME TOKEN or NAME TOKEN metrics'),
        (f'garden {OTHER}" metrics', 'letters, digits'),
        (f'garden:{OTHER}', 'sha256: and 64 hexadecimal digits'),
    ],
)
def test_bad_line_is_refused_by_its_number(line, words, path):
    """The message has the number of the line and what a line may be, not the line."""
    path.write_text(f'old {TOKEN}\n\n# comment\n{line}')
    with pytest.raises(ValueError, match=rf'^{path}: line 4: ') as raised:
        TokensFile(path)
    assert words in str(raised.value)
    assert_shows_no_token(str(raised.value))


@pytest.mark.parametrize('form', [str, sha256], ids=['token', 'digest'])
@pytest.mark.parametrize('scopes', [('', ' metrics'), (' metrics', '')])
def test_token_with_two_scopes_is_refused(scopes, form, path, always_checked, caplog):
    """A token of two scopes is refused with both lines: no line wins by its place."""
    first, second = (f'a {TOKEN}{scopes[0]}', f'b {form(TOKEN)}{scopes[1]}')
    tokens = TokensFile(path)
    path.write_text(f'{OTHER}\n{first}\n\n{second}\n')
    sentence = f'^{path}: lines 2 and 4: one token, two scopes$'
    with pytest.raises(ValueError, match=sentence) as raised:
        TokensFile(path)
    assert tokens.find(OTHER) is None  # a running server keeps the tokens it has
    assert 'lines 2 and 4' in caplog.text
    assert_shows_no_token(str(raised.value) + caplog.text)
    path.write_text(f'{first}\n{first}\n')
    assert len(TokensFile(path)) == 1


@pytest.fixture
def always_checked(monkeypatch):
    """Look at the tokens file at every request, and wait for it."""
    monkeypatch.setattr(TokensFile, 'CHECK_EVERY', 0)
    monkeypatch.setattr(TokensFile, 'CHECK_WITHIN', PATIENCE)


def test_tokens_file_of_the_same_size_and_time_is_read(path, always_checked):
    """A token that was replaced is refused, also where only the ctime shows it."""
    tokens, before = TokensFile(path), path.stat()

    def has_another_ctime():
        path.write_text(f'new {TOKEN[::-1]}\n')
        return path.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(has_another_ctime, 'the clock of the file system goes on')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tokens.find(TOKEN) is None
    assert tokens.find(TOKEN[::-1]) == Token('new')


def test_tokens_file_that_is_replaced_during_a_read(path, always_checked, monkeypatch):
    """It is read again, after the first reading and after a later one."""
    texts, read_file = [OTHER, TOKEN[::-1]], tokens_module.read_file

    def read_too_early(path):
        content = read_file(path)
        if texts:
            path.unlink()
            path.write_text(texts.pop())
        return content

    monkeypatch.setattr(tokens_module, 'read_file', read_too_early)
    tokens = TokensFile(path)
    assert tokens.find(TOKEN[::-1])
    assert tokens.find(OTHER)


DAMAGE = {
    'removed': lambda path: path.unlink(),
    'a directory': lambda path: (path.unlink(), path.mkdir()),
    'a FIFO': lambda path: (path.unlink(), os.mkfifo(path)),
    'a device': lambda path: (path.unlink(), path.symlink_to('/dev/zero')),
    'too long': lambda path: path.write_text(f'{OTHER}\n{"#" * 2**20}'),
    'empty': lambda path: path.write_text(''),
    'bad token': lambda path: path.write_text(f'{OTHER}\nsecret"{OTHER}\n'),
    'name that is not printable': lambda path: path.write_text(f'a\x7f {OTHER}\n'),
    'not UTF-8': lambda path: path.write_bytes(OTHER.encode() + b'\n\xff\n'),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_broken_tokens_file_keeps_the_old_tokens(damage, path, always_checked, caplog):
    """A tokens file that cannot be used changes nothing; it is logged and counted."""
    caplog.set_level(logging.INFO, 'plants')
    client = serve_tokens(TokensFile(path), metrics=True)
    DAMAGE[damage](path)
    for _ in range(3):
        assert value_of(client, f'Bearer {TOKEN}') == 200
        assert value_of(client, f'Bearer {OTHER}') == 40101
    (level,) = [line.levelno for line in caplog.records if str(path) in line.message]
    assert level == logging.ERROR
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_text(f'new {OTHER}\n')
    assert value_of(client, f'Bearer {OTHER}') == 200
    assert value_of(client, f'Bearer {TOKEN}') == 40101
    assert 'tokens that are accepted now: 1' in caplog.text
    assert_shows_no_token(caplog.text)
    metrics = client.get('/metrics', headers={'Authorization': f'Bearer {OTHER}'})
    assert 'plants_token_reload_failures_total 1.0\n' in metrics.text


def test_tokens_file_is_not_looked_at_for_each_request(path, monkeypatch):
    """Only one request every half a second pays for it."""
    monkeypatch.setattr(TokensFile, 'CHECK_EVERY', PATIENCE)
    tokens = TokensFile(path)
    path.unlink()
    path.write_text(OTHER)
    assert tokens.find(TOKEN)


def test_requests_go_on_while_the_tokens_file_does_not_answer(
    path, always_checked, monkeypatch
):
    """One thread at a time waits for a file on a dead mount; then it is read."""
    assert WITHIN < 1
    monkeypatch.setattr(TokensFile, 'CHECK_WITHIN', 0.01)
    tokens = TokensFile(path)
    answers = threading.Event()
    waiting = []

    def stat():
        waiting.append(threading.current_thread())
        assert answers.wait(PATIENCE)
        return path.stat()

    tokens._path = mock.Mock(wraps=path, stat=stat)
    for _ in range(20):
        assert tokens.find(TOKEN)
    assert len(waiting) == 1
    assert waiting[0].daemon, 'the process could not end'
    answers.set()
    waiting[0].join()
