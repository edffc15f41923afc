"""Settings of the environment, tokens, the tokens file, ``app:app`` and importing."""

import dataclasses
import hashlib
import logging
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TOKEN, Client
from errors import assert_error

import app
from app import create_app, get_app
from store import Plant
from store.memory import MemoryStore
from web import tokens as tokens_module
from web.settings import VARIABLES, Settings
from web.tokens import Tokens, TokensFile

ROOT = Path(__file__).resolve().parents[2]

FERN = {'id': 1, 'name': 'Fern'}

# One character longer than TOKEN. No message may show either.
OTHER = f'{TOKEN}r'


def sha256(token):
    """Return the ``sha256:`` entry of a token."""
    return f'sha256:{hashlib.sha256(token.encode()).hexdigest()}'


@pytest.fixture
def path(tmp_path):
    """Return a tokens file with one token."""
    path = tmp_path / 'tokens'
    path.write_text(f'old {TOKEN}\n')
    return path


# ---- Settings


def test_defaults_are_a_file_and_no_token(tmp_path, monkeypatch):
    """The default is a file in the working directory, and no token."""
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environ({})
    assert settings == Settings(
        'jsonl:plants.jsonl', None, 65_536, metrics=False, cors_origins=()
    )
    assert list(tmp_path.iterdir()) == []


def test_each_variable_sets_a_field():
    """Each variable sets one field; other variables are ignored."""
    settings = Settings.from_environ(
        {
            'PLANTS_STORE': 'memory:',
            'PLANTS_TOKENS': TOKEN,
            'PLANTS_MAX_BODY': '1000',
            'PLANTS_LOG': 'json',
            'PLANTS_METRICS': '1',
            'PLANTS_CORS_ORIGINS': 'https://a.example, http://localhost:3000',
            'PLANTS': 'x',
            'MAX_BODY': '7',
        }
    )
    assert settings.store == 'memory:'
    assert settings.max_body_bytes == 1000
    assert settings.tokens.name_of(TOKEN)
    assert settings.metrics is True
    assert settings.cors_origins == ('https://a.example', 'http://localhost:3000')


def test_settings_are_frozen():
    """Settings cannot be changed, and their repr shows no token."""
    settings = Settings.from_environ({'PLANTS_TOKENS': TOKEN})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_body_bytes = 1
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ('name', 'nearest'),
    [
        ('PLANTS_TOKEN', 'PLANTS_TOKENS'),
        ('PLANTS_MAXBODY', 'PLANTS_MAX_BODY'),
        ('PLANTS_TOKEN_FILE', 'PLANTS_TOKENS_FILE'),
        ('PLANTS_CORS_ORIGIN', 'PLANTS_CORS_ORIGINS'),
        ('PLANTS_DATABASE_URL', None),
        ('PLANTS_', None),
        ('PLANTS_tokens', None),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest_name(name, nearest):
    """A misspelt variable stops the start; the message does not show its value."""
    with pytest.raises(ValueError, match=f'^{name}: there is no such') as raised:
        Settings.from_environ({name: TOKEN})
    shown = str(raised.value).split()[-1]
    assert shown == nearest if nearest else shown in VARIABLES
    assert TOKEN not in str(raised.value)


def test_metrics_without_their_package_are_refused(monkeypatch):
    """The message names the package; without metrics it is not needed."""
    monkeypatch.setitem(sys.modules, 'prometheus_client', None)
    assert Settings.from_environ({'PLANTS_METRICS': '0'}).metrics is False
    with pytest.raises(ValueError, match=r'^PLANTS_METRICS: .* prometheus_client'):
        Settings.from_environ({'PLANTS_METRICS': '1'})


@pytest.mark.parametrize(
    'url',
    [
        *('', ' ', 'memory', 'memory:x', 'Memory:', ' memory:', 'jsonl', 'jsonl:'),
        *('JSONL:x', 'plants.jsonl', '/srv/plants.jsonl', 'redis://x', 'file:x', '\n'),
        'memory://',
    ],
    ids=repr,
)
def test_bad_store_url_is_refused(url):
    """A URL of no known store is refused; the message lists the stores."""
    with pytest.raises(ValueError, match=r'^PLANTS_STORE: ') as raised:
        Settings.from_environ({'PLANTS_STORE': url})
    message = str(raised.value)
    assert repr(url) in message
    assert 'memory:' in message.replace(repr(url), '')
    assert 'jsonl:PATH' in message


@pytest.mark.parametrize(
    'text',
    [
        *('', ' ', '0', '00', '-1', '+1', '1.5', '1e3', '64k', '64 K', '0x10', '01'),
        *(' 1', '1 ', '1\n', '1_000', 'many', '\u0661', '\xb2', '9' * 19, '9' * 5_000),
    ],
    ids=lambda text: ascii(text)[:30],
)
def test_bad_max_body_is_refused(text):
    """A limit that is not a positive number of bytes is refused."""
    with pytest.raises(ValueError, match=r'^PLANTS_MAX_BODY: ') as raised:
        Settings.from_environ({'PLANTS_MAX_BODY': text})
    assert repr(text) in str(raised.value)
    assert 'positive number of bytes' in str(raised.value)


@pytest.mark.parametrize(
    ('variable', 'default', 'other'),
    [('PLANTS_LOG', 'text', 'json'), ('PLANTS_METRICS', '0', '1')],
)
def test_only_two_values_are_accepted(variable, default, other):
    """One of two values is the default, and every other value is refused."""
    assert Settings.from_environ({variable: default}) == Settings.from_environ({})
    assert Settings.from_environ({variable: other})
    for text in ('', ' ', other.upper() + ' ', 'on', 'yes', 'true', '2'):
        with pytest.raises(ValueError, match=f'^{variable}: ') as raised:
            Settings.from_environ({variable: text})
        assert f'{text!r} is not {default} or {other}' in str(raised.value)


@pytest.mark.parametrize(
    'text',
    [
        *('', ' ', ',', 'a.example', '//a.example', 'https://', 'https://a.example/'),
        *('https://a.example/page', 'https://a.example?x', 'https://u@a.example'),
        *('https://A.example', 'HTTPS://a.example', 'https://a.example:', 'null'),
        *('*,https://a.example', '*.a.example', 'https://*.a.example', '**'),
        *('https://a.example,', 'https://a.example b.example', 'https://a.example\nx'),
    ],
    ids=repr,
)
def test_bad_origin_is_refused(text):
    """An origin that no browser sends is refused; the message has an example."""
    with pytest.raises(ValueError, match=r'^PLANTS_CORS_ORIGINS: ') as raised:
        Settings.from_environ({'PLANTS_CORS_ORIGINS': text})
    assert 'https://example.org' in str(raised.value)


@pytest.mark.parametrize(
    'text',
    [
        *('*', 'https://a.example', 'http://[::1]:3000', 'http://127.0.0.1'),
        *(
            'https://xn--a-ecp.example',
            'moz-extension://0a1b',
            'https://a.example:8443',
        ),
    ],
)
def test_origin_of_a_browser_is_accepted(text):
    """Every kind of origin that a browser sends is accepted, and * for all."""
    assert Settings.from_environ({'PLANTS_CORS_ORIGINS': text}).cors_origins == (text,)


BAD_TOKENS = {
    'name and token': f'garden {OTHER}',
    'three words': f'one two {OTHER}',
    'two lines': f'{OTHER}\n{TOKEN}',
    'quotes': f'"{OTHER}"',
    'semicolon': f'{OTHER};{TOKEN}',
    'non-ASCII': f'{OTHER}é',
    'control character': f'{OTHER}\x07',
    'equals sign inside': f'{OTHER}=x',
    'only equals signs': '==',
    'short digest': sha256(OTHER)[:-1],
    'long digest': sha256(OTHER) + '0',
    'no digest': 'sha256:',
    'digest that is not hexadecimal': sha256(OTHER)[:-1] + 'g',
    'other digest': 'md5:' + 'a' * 32,
    'upper case scheme': sha256(OTHER).replace('sha', 'SHA'),
    'colon': f'name:{OTHER}',
    'comment': f'{OTHER} # mine',
    'comment at once': f'{OTHER}#mine',
    'comment alone': f'# {OTHER}',
}


@pytest.mark.parametrize('name', BAD_TOKENS)
@pytest.mark.parametrize('before', ['', f'{TOKEN},'], ids=['alone', 'after a good one'])
def test_bad_token_is_refused_by_its_number(before, name):
    """A bad token stops the start; the message has its number, not its text."""
    with pytest.raises(ValueError, match=r'^PLANTS_TOKENS: ') as raised:
        Settings.from_environ({'PLANTS_TOKENS': before + BAD_TOKENS[name]})
    assert str(raised.value).startswith(f'PLANTS_TOKENS: token-{2 if before else 1}: ')
    exception = raised.value
    while exception is not None:
        for secret in (TOKEN, OTHER, sha256(OTHER)[7:-1]):
            assert secret not in str(exception)
        exception = exception.__context__


@pytest.mark.parametrize('listed', ['', ' ', '\n', ',,,', ' , '], ids=repr)
def test_empty_list_of_tokens_is_refused(listed):
    """A variable that is set but has no token stops the start: nothing runs open."""
    with pytest.raises(ValueError, match='PLANTS_TOKENS: there is no token'):
        Settings.from_environ({'PLANTS_TOKENS': listed})


@pytest.mark.parametrize(
    'listed',
    [
        f'{TOKEN},{OTHER}',
        f' {TOKEN} ,\t{OTHER}\n',
        f',,{TOKEN}, ,{OTHER},',
        f'{sha256(TOKEN)},{sha256(OTHER)}',
    ],
    ids=['plain', 'blanks', 'empty entries', 'digests'],
)
def test_tokens_are_separated_by_commas(listed):
    """Tokens are named by their numbers; blanks around commas are ignored."""
    tokens = Settings.from_environ({'PLANTS_TOKENS': listed}).tokens
    assert len(tokens) == 2
    assert tokens.name_of(TOKEN) == 'token-1'
    assert tokens.name_of(OTHER) == 'token-2'


@pytest.mark.parametrize('listed', ['', TOKEN])
@pytest.mark.parametrize('path', ['', '/etc/tokens'])
def test_both_token_variables_are_refused(path, listed):
    """Both variables for tokens are an error, even if one of them is empty."""
    with pytest.raises(
        ValueError, match=r'PLANTS_TOKENS.*PLANTS_TOKENS_FILE'
    ) as raised:
        Settings.from_environ({'PLANTS_TOKENS': listed, 'PLANTS_TOKENS_FILE': path})
    assert TOKEN not in str(raised.value)


def test_missing_tokens_file_is_refused(tmp_path):
    """A missing tokens file stops the start; the message has its path."""
    path = tmp_path / 'tokens'
    with pytest.raises(
        ValueError, match=r'^PLANTS_TOKENS_FILE: .*No such file'
    ) as raised:
        Settings.from_environ({'PLANTS_TOKENS_FILE': str(path)})
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    'path', ['', '/', '/dev/null', '/dev/null/x', 'a\0b'], ids=repr
)
def test_unreadable_tokens_file_is_refused(path):
    """A path that cannot be read, or has no token, stops the start."""
    with pytest.raises(ValueError, match=r'^PLANTS_TOKENS_FILE: '):
        Settings.from_environ({'PLANTS_TOKENS_FILE': path})


BAD_FILES = {
    'empty': b'',
    'blank': b'\n\n',
    'comments': b'# none\n',
    'three words': f'one two {OTHER}\n'.encode(),
    'bad character': f'{TOKEN}\n{OTHER}"\n'.encode(),
    'commas': f'{TOKEN},{OTHER}\n'.encode(),
    'bad digest': sha256(OTHER)[:-1].encode(),
    'latin-1': f'{TOKEN}\n{OTHER}é\n'.encode('latin-1'),
    'utf-16': f'{TOKEN}\n'.encode('utf-16'),
}


@pytest.mark.parametrize('name', BAD_FILES)
def test_bad_tokens_file_is_refused(name, path):
    """A bad tokens file stops the start; the message shows no token."""
    path.write_bytes(BAD_FILES[name])
    with pytest.raises(ValueError, match=r'^PLANTS_TOKENS_FILE: ') as raised:
        Settings.from_environ({'PLANTS_TOKENS_FILE': str(path)})
    for secret in (TOKEN, OTHER, sha256(OTHER)[7:-1]):
        assert secret not in str(raised.value)


def test_bad_tokens_file_is_named(path):
    """The message about a bad tokens file has its path and the line."""
    path.write_text(f'{TOKEN}\n\n{OTHER}"\n')
    with pytest.raises(ValueError, match='line 3: a token may have only') as raised:
        Settings.from_environ({'PLANTS_TOKENS_FILE': str(path)})
    assert str(raised.value).startswith(f'PLANTS_TOKENS_FILE: {path}: line 3: ')


# ---- Tokens


@pytest.mark.parametrize(
    ('lines', 'names'),
    [
        ([TOKEN], {TOKEN: 'token-1'}),
        ([f'  {TOKEN}\t'], {TOKEN: 'token-1'}),
        ([f'garden {TOKEN}'], {TOKEN: 'garden'}),
        ([f'garden\t {TOKEN}'], {TOKEN: 'garden'}),
        ([sha256(TOKEN)], {TOKEN: 'token-1'}),
        ([f'garden {sha256(TOKEN)}'], {TOKEN: 'garden'}),
        ([f'sha256:{sha256(TOKEN)[7:].upper()}'], {TOKEN: 'token-1'}),
        ([TOKEN, OTHER], {TOKEN: 'token-1', OTHER: 'token-2'}),
        ([f'a {TOKEN}', f'a {OTHER}'], {TOKEN: 'a', OTHER: 'a'}),
        ([f'a {TOKEN}', f'b {TOKEN}'], {TOKEN: 'b'}),
        ([TOKEN, f'b {sha256(TOKEN)}'], {TOKEN: 'b'}),
        (['#', f'#a {OTHER}', f'a#b {TOKEN}'], {TOKEN: 'a#b'}),
        (['', '# comment', f'{TOKEN} # mine'], {TOKEN: 'token-3'}),
        (['a', 'b='], {'a': 'token-1', 'b=': 'token-2'}),
        (['-._~+/=='], {'-._~+/==': 'token-1'}),
        (['x' * 10_000], {'x' * 10_000: 'token-1'}),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_line_of_a_tokens_file_is_read(lines, names):
    """A line is a token or its digest, with or without a name."""
    assert_accepts(Tokens.parse(lines), names)


@pytest.mark.parametrize(
    ('tokens', 'names'),
    [
        ([TOKEN], {TOKEN: 'token-1'}),
        (TOKEN, {TOKEN: 'token-1'}),
        (sha256(TOKEN), {TOKEN: 'token-1'}),
        ([TOKEN, OTHER], {TOKEN: 'token-1', OTHER: 'token-2'}),
        ((sha256(TOKEN), OTHER), {TOKEN: 'token-1', OTHER: 'token-2'}),
        (iter([TOKEN, OTHER]), {TOKEN: 'token-1', OTHER: 'token-2'}),
        ({'garden': TOKEN}, {TOKEN: 'garden'}),
        ({'garden': TOKEN, 'shed': sha256(OTHER)}, {TOKEN: 'garden', OTHER: 'shed'}),
        ({'a': TOKEN, 'b': TOKEN}, {TOKEN: 'b'}),
        ({'the # garden': TOKEN}, {TOKEN: 'the # garden'}),
        ({'': TOKEN}, {TOKEN: ''}),
        (['-._~+/=='], {'-._~+/==': 'token-1'}),
    ],
    ids=lambda value: ascii(value).partition(' object at')[0][:50],
)
def test_tokens_are_named_by_number_or_mapping(tokens, names):
    """Tokens or their digests are named by number, or by the keys of a mapping."""
    assert_accepts(Tokens.of(tokens), names)


def assert_accepts(tokens, names):
    """Check that exactly these tokens are accepted, under these names."""
    assert len(tokens) == len(names)
    assert {token: tokens.name_of(token) for token in names} == names
    for token in ('', 'token', 'garden', sha256(TOKEN), f' {TOKEN}', TOKEN.upper()):
        assert tokens.name_of(token) is None


# What ``Tokens.of`` refuses: it strips nothing from a token.
NOT_STRIPPED = ['', ' ', '#', f'{OTHER},', f' {OTHER}', f'{OTHER} ', f'{OTHER}\n']


@pytest.mark.parametrize('bad', [*BAD_TOKENS.values(), *NOT_STRIPPED], ids=ascii)
@pytest.mark.parametrize(
    ('tokens', 'where'),
    [
        (lambda bad: bad, 'token-1'),
        (lambda bad: [TOKEN, bad], 'token-2'),
        (lambda bad: {'shed': TOKEN, 'garden': bad}, 'garden'),
    ],
    ids=['text', 'list', 'mapping'],
)
def test_bad_token_is_refused_by_its_name(tokens, where, bad):
    """A bad token is refused by its name; it is never shown, cut, or ignored."""
    with pytest.raises(ValueError, match=f'^{where}: ') as raised:
        create_app(MemoryStore(), tokens=tokens(bad))
    for secret in (TOKEN, OTHER, sha256(OTHER)[7:-1]):
        assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        (f'one two {OTHER}', 'not TOKEN or NAME TOKEN'),
        (f'one {OTHER} {TOKEN} # mine', 'not TOKEN or NAME TOKEN'),
        (f'{OTHER},{TOKEN}', 'letters, digits'),
        (f'{OTHER}#mine', 'letters, digits'),
        (f'garden {OTHER}"', 'letters, digits'),
        (f'garden: {OTHER}\xe9', 'letters, digits'),
        (f'garden:{OTHER}', 'sha256: and 64 hexadecimal digits'),
        (f'garden {sha256(OTHER)[:-1]}', 'sha256: and 64 hexadecimal digits'),
        ('sha256:', 'sha256: and 64 hexadecimal digits'),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_bad_line_is_refused_by_its_number(line, words):
    """The message has the number of the line and what a line may be, not the line."""
    with pytest.raises(ValueError, match=r'^line 4: ') as raised:
        Tokens.parse([f'old {TOKEN}', '', '# comment', line])
    assert words in str(raised.value)
    for secret in (TOKEN, OTHER, sha256(OTHER)[7:-1]):
        assert secret not in str(raised.value)


@pytest.mark.parametrize(
    'make',
    [
        lambda: Tokens({}),
        lambda: Tokens.of([]),
        lambda: Tokens.of({}),
        lambda: Tokens.of(iter(())),
        lambda: Tokens.parse([]),
        lambda: Tokens.parse(['', ' ', '# none', '\t# none', '#']),
    ],
    ids=['digests', 'list', 'mapping', 'iterator', 'no lines', 'no token'],
)
def test_no_tokens_are_an_error(make):
    """However tokens are made, to have none is an error."""
    with pytest.raises(ValueError, match=r'^there is no token$'):
        make()


def test_only_digests_are_kept():
    """A running service keeps only the digest of a token."""
    for tokens in (Tokens.parse([f'garden {TOKEN}']), Tokens.of({'garden': TOKEN})):
        assert TOKEN not in repr(vars(tokens))
        assert TOKEN not in repr(tokens)


def serve_tokens(tokens):
    """Return a client, without a token, of a service that accepts these tokens."""
    return Client(create_app(MemoryStore(), tokens=tokens))


def status_of(client, authorization):
    """Return the error value of a request with an Authorization header, or 200."""
    headers = {} if authorization is None else {'authorization': authorization}
    response = client.add(FERN, **headers)
    if response.status_int == 200:
        return 200
    message = assert_error(response, response.json['error'])
    assert TOKEN not in message
    return response.json['error']


@pytest.mark.parametrize(
    'authorization',
    [
        *(f'Bearer {TOKEN}', f'bearer {TOKEN}', f'BEARER {TOKEN}', f'bEaReR {TOKEN}'),
        *(f'Bearer   {TOKEN}', f'Bearer {TOKEN}   ', f'Bearer  {TOKEN} '),
    ],
)
def test_authorization_with_a_token_is_accepted(authorization):
    """The scheme may be in any case, with any number of spaces after it."""
    assert status_of(serve_tokens([TOKEN]), authorization) == 200


@pytest.mark.parametrize(
    'authorization',
    [
        *(None, '', ' ', 'Bearer', 'Bearer ', 'Bearer    ', TOKEN, f' {TOKEN}', 'Bear'),
        *(f'Basic {TOKEN}', f'Token {TOKEN}', f'Bearer{TOKEN}', f'Bearer:{TOKEN}'),
        *(f'Bearer={TOKEN}', f'Bearers {TOKEN}', f'"Bearer" {TOKEN}', 'Digest a="b"'),
        *(f'Basic YTpi, Bearer {TOKEN}', f'Basic YTpi,Bearer {TOKEN}', f', {TOKEN}'),
    ],
    ids=repr,
)
def test_authorization_without_a_bearer_token_is_40100(authorization):
    """No header, another scheme, or no token after it is 40100."""
    assert status_of(serve_tokens([TOKEN]), authorization) == 40100


@pytest.mark.parametrize(
    'authorization',
    [
        *('Bearer wrong', f'Bearer {TOKEN[:-1]}', f'Bearer {OTHER}', 'Bearer Bearer'),
        *(f'Bearer {TOKEN.upper()}', f'Bearer x{TOKEN}', f'Bearer "{TOKEN}"'),
        *(f'Bearer {TOKEN} x', f'Bearer {TOKEN},', f'Bearer {TOKEN};', 'Bearer ,'),
        *(f'Bearer {TOKEN}, Bearer {TOKEN}', f'Bearer {TOKEN},Bearer {TOKEN}'),
        *(f'Bearer {TOKEN}, Basic YTpi', f'Bearer Bearer {TOKEN}', f'Bearer ={TOKEN}'),
        *(f'Bearer garden {TOKEN}', 'Bearer garden', f'Bearer {sha256(TOKEN)}'),
        *(f'Bearer {sha256(TOKEN)[7:]}', f'Bearer {TOKEN}=', f'Bearer {TOKEN}\xe9'),
        *('Bearer \xe9\xff', 'Bearer \xc3\xa9', 'Bearer ' + 'x' * 100_000),
    ],
    ids=lambda authorization: ascii(authorization)[:60],
)
def test_wrong_bearer_token_is_40101(authorization):
    """A bearer token that is not exactly one of ours is 40101."""
    assert status_of(serve_tokens({'garden': TOKEN}), authorization) == 40101


def test_several_tokens_are_accepted():
    """Several tokens may be valid at once, however they are written."""
    client = serve_tokens([TOKEN, sha256(OTHER), 'third'])
    for token in (TOKEN, OTHER, 'third'):
        assert status_of(client, f'Bearer {token}') == 200


# ---- the arguments of create_app


@pytest.mark.parametrize(
    'tokens',
    [[], (), {}, '', ' ', [''], [' '], ['# none']],
    ids=repr,
)
def test_create_app_refuses_an_empty_token(tokens):
    """The service never runs open: without a token no application is made."""
    with pytest.raises(ValueError, match='token'):
        create_app(MemoryStore(), tokens=tokens)


def test_create_app_requires_the_tokens_argument():
    """Tokens cannot be forgotten: the argument has no default."""
    with pytest.raises(TypeError):
        create_app(MemoryStore())


@pytest.mark.parametrize(
    'tokens',
    [None, [None], {'garden': None}, {'garden': 1}, b'abc', [b'abc']],
    ids=repr,
)
def test_token_must_be_text(tokens):
    """None, a number or bytes are never a token: None may be a variable not set."""
    with pytest.raises((ValueError, TypeError, AttributeError)):
        create_app(MemoryStore(), tokens=tokens)


def test_two_applications_are_independent():
    """Stores, tokens and limits belong to an application, not to the process."""
    stores = [MemoryStore(), MemoryStore()]
    first = Client(create_app(stores[0], tokens=TOKEN), TOKEN)
    second = Client(create_app(stores[1], tokens=OTHER, max_body_bytes=40), OTHER)
    assert first.add(FERN).status_int == 200
    assert second.add({'id': 1, 'name': 'Moss'}).status_int == 200
    assert list(stores[0]) == [Plant(1, 'Fern')]
    assert list(stores[1]) == [Plant(1, 'Moss')]
    assert_error(first.add(FERN, authorization=f'Bearer {OTHER}'), 40101)
    assert_error(second.add(FERN, authorization=f'Bearer {TOKEN}'), 40101)
    long = {'id': 2, 'name': 'x' * 40}
    assert first.add(long).status_int == 200
    assert_error(second.add(long), 40003)
    stores[0].close()
    assert_error(first.add(FERN), 50300)
    assert second.add({'id': 1, 'name': 'Moss'}).status_int == 200


# ---- a tokens file that changes


@pytest.fixture
def pass_a_second(monkeypatch):
    """Return a function that advances the clock of the service by a second."""
    now = time.monotonic()
    clock = SimpleNamespace(
        monotonic=lambda: now, perf_counter=time.perf_counter, time=time.time
    )
    monkeypatch.setattr(tokens_module, 'time', clock)

    def pass_a_second():
        nonlocal now
        now += 1

    return pass_a_second


def test_tokens_are_rotated(path, pass_a_second):
    """A token is added, both are accepted, and the old one is removed."""
    client = serve_tokens(TokensFile(path))

    def statuses():
        return [status_of(client, f'Bearer {token}') for token in (TOKEN, OTHER)]

    assert statuses() == [200, 40101]
    path.write_text(f'old {TOKEN}\nnew {sha256(OTHER)}  # from May on\n')
    pass_a_second()
    assert statuses() == [200, 200]
    path.write_text(f'new {OTHER}\n')
    pass_a_second()
    assert statuses() == [40101, 200]


def test_changed_tokens_file_is_read_within_a_second(path):
    """A running service accepts an added token without a reload."""
    client = serve_tokens(TokensFile(path))
    path.write_text(f'{TOKEN}\n{OTHER}\n')
    deadline = time.monotonic() + 1
    while (status := status_of(client, f'Bearer {OTHER}')) != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert status == 200


def test_replaced_tokens_file_is_read(path, pass_a_second):
    """A file replaced by a rename is read, whatever its size and time."""
    tokens = TokensFile(path)
    spare = path.with_name('spare')
    spare.write_text(f'new {TOKEN[::-1]}\n')
    spare.replace(path)
    pass_a_second()
    assert tokens.name_of(TOKEN) is None
    assert tokens.name_of(TOKEN[::-1]) == 'new'


DAMAGE = {
    'removed': lambda path: path.unlink(),
    'a directory': lambda path: (path.unlink(), path.mkdir()),
    'empty': lambda path: path.write_text(''),
    'only comments': lambda path: path.write_text('# nobody\n'),
    'bad token': lambda path: path.write_text(f'{OTHER}\nsecret"{OTHER}\n'),
    'too many words': lambda path: path.write_text(f'one two {OTHER}\n'),
    'not UTF-8': lambda path: path.write_bytes(OTHER.encode() + b'\n\xff\n'),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_broken_tokens_file_keeps_the_old_tokens(damage, path, pass_a_second, caplog):
    """A tokens file that cannot be used changes nothing, and is logged once."""
    client = serve_tokens(TokensFile(path))
    DAMAGE[damage](path)
    for _ in range(3):
        pass_a_second()
        assert status_of(client, f'Bearer {TOKEN}') == 200
        assert status_of(client, f'Bearer {OTHER}') == 40101
    (record,) = [record for record in caplog.records if record.name == 'plants']
    assert record.levelno == logging.ERROR
    assert str(path) in record.getMessage()
    assert TOKEN not in caplog.text
    assert OTHER not in caplog.text
    if path.is_dir():
        path.rmdir()
    path.write_text(f'new {OTHER}\n')
    pass_a_second()
    assert status_of(client, f'Bearer {OTHER}') == 200
    assert status_of(client, f'Bearer {TOKEN}') == 40101


def test_tokens_file_that_is_back_is_read(path, pass_a_second):
    """A tokens file that was moved away, edited and moved back is read again."""
    tokens = TokensFile(path)
    away = path.rename(path.with_name('away'))
    pass_a_second()
    assert tokens.name_of(TOKEN) == 'old'
    away.write_text(f'back {TOKEN}\n')
    away.rename(path)
    pass_a_second()
    assert tokens.name_of(TOKEN) == 'back'


@pytest.mark.parametrize(
    'content',
    [
        f'garden {TOKEN}\r\nother {OTHER}\r\n',
        f'# the garden\n\n  garden\t{TOKEN}  # comment\n#\nother {OTHER}',
        f'garden {sha256(TOKEN)}\nother {sha256(OTHER)}\n',
    ],
    ids=['CRLF', 'comments', 'digests'],
)
def test_tokens_file_may_have_comments_and_any_line_end(content, path):
    """A tokens file may have comments, empty lines, and line ends of any system."""
    path.write_bytes(content.encode())
    tokens = Settings.from_environ({'PLANTS_TOKENS_FILE': str(path)}).tokens
    assert tokens.name_of(TOKEN) == 'garden'
    assert tokens.name_of(OTHER) == 'other'
    assert len(tokens) == 2


@pytest.mark.parametrize(
    'first', ['# garden', '', 'garden secret'], ids=['comment', 'blank', 'token']
)
def test_byte_order_mark_is_ignored(first, path):
    """A byte order mark of an editor changes neither a comment nor a name."""
    path.write_bytes(f'\ufeff{first}\nold {TOKEN}\n'.encode())
    tokens = TokensFile(path)
    names = {'garden': None, 'secret': None, TOKEN: 'old'}
    if first == 'garden secret':
        names['secret'] = 'garden'
    assert {token: tokens.name_of(token) for token in names} == names


def test_number_of_new_tokens_is_logged(path, pass_a_second, caplog):
    """The log has how many tokens are accepted after a change, and no token."""
    caplog.set_level(logging.INFO, 'plants')
    tokens = TokensFile(path)
    path.write_text(f'{TOKEN}\n{OTHER}\n')
    pass_a_second()
    tokens.name_of(TOKEN)
    assert '2 tokens' in caplog.text
    assert TOKEN not in caplog.text


# ---- app:app


def run(script, directory, **environ):
    """Run a script in an interpreter of its own; return what it printed."""
    finished = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(script)],
        cwd=directory,
        env={'PYTHONPATH': str(ROOT), 'PYTHONDONTWRITEBYTECODE': '1', **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, finished.stderr


def test_import_has_no_side_effect(tmp_path):
    """Importing reads no variable, touches no file, and prints or starts nothing."""
    script = """
        import logging, signal, sys, threading
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        import app
        assert 'app' not in vars(app)
        assert threading.active_count() == 1
        assert not logging.getLogger().handlers
        assert not logging.getLogger('plants').handlers
        assert handlers == [signal.getsignal(n) for n in signal.valid_signals()]
        assert 'gunicorn' not in sys.modules
    """
    environ = {'PLANTS_STORE': 'bad', 'PLANTS_TOKENS': '', 'PLANTS_MAX_BODY': 'bad'}
    assert run(script, tmp_path, **environ) == ('', '')
    assert list(tmp_path.iterdir()) == []


def test_application_is_made_at_first_access(tmp_path):
    """``app:app`` is one application, made from the environment at first access."""
    script = """
        import app
        first = app.app
        assert first is app.app
        assert callable(first)
        from app import app as imported
        assert imported is first
    """
    environ = {'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS': TOKEN}
    assert run(script, tmp_path, **environ) == ('', '')
    assert list(tmp_path.iterdir()) == []


def test_unknown_attribute_is_an_error():
    """Another name that the module does not have is an AttributeError with the name."""
    with pytest.raises(AttributeError, match='application'):
        app.application  # noqa: B018
    assert not hasattr(app, 'App')


def test_get_app_refuses_a_bad_environment():
    """A bad variable is refused before a store is opened or a token generated."""
    with pytest.raises(ValueError, match='PLANTS_MAX_BODY'):
        get_app({'PLANTS_STORE': 'memory:', 'PLANTS_MAX_BODY': 'bad'})


@pytest.fixture
def at_exit(monkeypatch):
    """Return the list of the functions registered with ``atexit``."""
    registered = []
    monkeypatch.setattr(app.atexit, 'register', registered.append)
    return registered


def test_get_app_follows_the_environment(at_exit, capsys):
    """Store, tokens and limit are those of the environment; nothing is printed."""
    environ = {
        'PLANTS_STORE': 'memory:',
        'PLANTS_TOKENS': f'{TOKEN},{sha256(OTHER)}',
        'PLANTS_MAX_BODY': '100',
    }
    client = Client(get_app(environ), TOKEN)
    assert client.add(FERN).status_int == 200
    assert client.add(FERN, authorization=f'Bearer {OTHER}').status_int == 200
    assert_error(client.send(b' ' * 101), 40003)
    assert capsys.readouterr() == ('', '')


def test_get_app_closes_the_store_at_the_end(at_exit):
    """The end of the process closes the store."""
    client = Client(get_app({'PLANTS_STORE': 'memory:', 'PLANTS_TOKENS': 'a'}), 'a')
    (close,) = at_exit
    close()
    assert_error(client.add(FERN), 50300)


def test_get_app_opens_no_file(at_exit, tmp_path, monkeypatch):
    """The store opens with the first request, in the process that serves it."""
    monkeypatch.chdir(tmp_path)
    client = Client(get_app({'PLANTS_TOKENS': 'a'}), 'a')
    assert list(tmp_path.iterdir()) == []
    assert client.add(FERN).status_int == 200
    assert (tmp_path / 'plants.jsonl').exists()
    for close in at_exit:
        close()


def curl_of(notice):
    """Return address, headers and body of the curl line in a notice."""
    (line,) = [line for line in notice.splitlines() if 'curl ' in line]
    curl, address, *options = shlex.split(line)
    assert curl == 'curl'
    values = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(': ') for flag, value in values if flag == '-H')
    (body,) = [value for flag, value in values if flag == '-d']
    return address, headers, body


def test_token_is_generated_and_printed_once(at_exit, capsys):
    """Without a configured token one is generated; the printed curl line works."""
    client = Client(get_app({'PLANTS_STORE': 'memory:'}))
    printed, notice = capsys.readouterr()
    assert printed == ''
    address, headers, body = curl_of(notice)
    assert address.endswith('/plants')
    assert_error(client.add(FERN), 40100)
    response = client.request(
        '/plants', method='POST', headers=headers, body=body.encode()
    )
    assert response.status_int == 200, response.text
    token = headers['Authorization'].removeprefix('Bearer ')
    assert len(token) >= 32
    assert token in notice.splitlines()[2].split()
    assert capsys.readouterr() == ('', '')


def test_each_start_generates_another_token(at_exit, capsys):
    """A generated token is random: no start can guess that of another."""
    tokens = set()
    for _ in range(5):
        get_app({'PLANTS_STORE': 'memory:'})
        _, headers, _ = curl_of(capsys.readouterr().err)
        tokens.add(headers['Authorization'])
    assert len(tokens) == 5


def test_child_of_a_fork_keeps_the_tokens_that_were_read(path, caplog):
    """A child that starts while the file is broken accepts what its parent has read.

    When the file is valid again, the child reads the new tokens by itself.
    """
    tokens = TokensFile(path)
    path.write_text('more than two words\n')
    pid = os.fork()
    if not pid:  # an assertion must not raise out of the child
        time.sleep(TokensFile.CHECK_EVERY)
        kept = tokens.name_of(TOKEN) == 'old' and tokens.name_of(OTHER) is None
        path.write_text(f'new {OTHER}\n')
        time.sleep(TokensFile.CHECK_EVERY)
        renewed = tokens.name_of(TOKEN) is None and tokens.name_of(OTHER) == 'new'
        os._exit(0 if kept and renewed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert caplog.messages == []


@pytest.mark.parametrize(
    'name', ['a\nb', 'a\x1b[2Jb', 'a\x00', '\u2028', '\x7f'], ids=ascii
)
def test_name_that_would_break_a_log_line_is_refused(path, name):
    """A name must be printable: it could break or disguise a line of the log."""
    with pytest.raises(ValueError, match='printable'):
        Tokens.of({name: TOKEN})
    if not name[1:2].isspace() and name != '\u2028':
        path.write_text(f'{name} {TOKEN}\n')
        with pytest.raises(ValueError, match='printable'):
            TokensFile(path)
