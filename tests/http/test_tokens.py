"""Bearer tokens: which are accepted, for what, and the tokens file."""

import copy
import errno
import hashlib
import itertools
import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from exchange import OTHER, Client, assert_error, table
from machine import only_worker
from rawclient import TOKEN
from server import Server, request
from test_metrics import FERN, read_metrics
from waiting import in_threads, wait_until

from app import create_app
from store.memory import MemoryStore
from web import tokens as module
from web.errors import Fault
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


@pytest.fixture(autouse=True)
def always_checked(monkeypatch):
    """Look at the tokens file at every request, and do not wait for it."""
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


def test_no_application_is_made_without_a_token_or_a_store():
    """The service never runs open; a URL in place of a store is not shown."""
    for tokens in (None, [], {}, ''):  # None may be a variable that is not set
        with pytest.raises(ValueError, match='token'):
            create_app(MemoryStore(), tokens=tokens)
    with pytest.raises(TypeError) as raised:
        create_app(f'postgresql://u:{TOKEN}@host/plants', tokens=TOKEN)
    assert_shows_no_token(str(raised.value))


# Tokens as an argument, or the text of a file; then the names of those accepted.
ACCEPTED_TOKENS = [
    ([TOKEN, sha256(OTHER), 'x/=='], {OTHER: 'token-2', 'x/==': 'token-3'}),
    ({'garden': TOKEN, 'shed': sha256(OTHER)}, {TOKEN: 'garden', OTHER: 'shed'}),
    (f'  {TOKEN}\t', {TOKEN: 'token-1'}),
    (f'a {TOKEN}\na {OTHER}', {TOKEN: 'a', OTHER: 'a'}),
    (f'{TOKEN}\nb {sha256(TOKEN).swapcase().replace("SHA", "sha")}', {TOKEN: 'b'}),
    (f'#\n#a {OTHER}\na#b {TOKEN} # mine', {TOKEN: 'a#b'}),
    (f'\ufeffa {TOKEN}\r\n\r\nb {OTHER}\r', {TOKEN: 'a', OTHER: 'b'}),
]


@pytest.mark.parametrize(('given', 'names'), ACCEPTED_TOKENS, ids=ascii)
def test_tokens_are_named(given, names, path):
    """By number, by a mapping, or by the lines of a file; a digest stands for one."""
    path.write_bytes(str(given).encode())
    tokens = TokensFile(path) if isinstance(given, str) else Tokens(given)
    assert {text: tokens.find(text) for text in names} == names
    for text in ('', 'token', 'garden', sha256(TOKEN), f' {TOKEN}', TOKEN.upper()):
        assert tokens.find(text) is None


WRONG = ['wrong', TOKEN[:-1], OTHER, TOKEN.upper(), f'"{TOKEN}"', f'{TOKEN} x']
WRONG += ['garden', f'garden {TOKEN}', sha256(TOKEN), '\xe9\xff', f'{TOKEN}\xa0']
# The scheme may be in any case, with any number of spaces after it.
AUTHORIZATIONS = {
    0: [f'Bearer {TOKEN}', f'bearer {TOKEN}', f'BEARER   {TOKEN} '],
    40100: [None, '', 'Bearer  ', TOKEN, f'Bearer:{TOKEN}', f'Basic a, Bearer {TOKEN}'],
    40101: [f'Bearer {token}' for token in WRONG],
}


def test_authorization_needs_a_bearer_token_of_ours():
    """No bearer token is 40100, and one that is not exactly one of ours 40101."""
    client = serve_tokens({'garden': TOKEN})
    for value, headers in AUTHORIZATIONS.items():
        for header in headers:
            assert value_of(client, header) == value, header


@pytest.mark.parametrize('form', [str, sha256], ids=['token', 'digest'])
def test_metrics_token_reads_metrics_and_nothing_else(form, path):
    """It is 40101 everywhere else, also if the tokens file has it later."""
    tokens = TokensFile(path)
    for given, ours in ({'a': TOKEN, '': OTHER}, OTHER), (tokens, TOKEN):
        with pytest.raises(ValueError, match=r'^(old)?: it is PLANTS_M') as raised:
            serve_tokens(given, metrics_token=form(ours))
        assert_shows_no_token(str(raised.value))
    client = serve_tokens(tokens, metrics_token=form(OTHER))
    serve_tokens(tokens, metrics_token='of-another-application')
    for last, value in (OTHER, 40101), (TOKEN[::-1], 0):
        replace(path, f'{TOKEN}\nlast {last}')
        assert value_of(client, f'Bearer {last}') == value
    ours = f'Bearer {OTHER}'
    assert value_of(client, ours, '/metrics') == 0
    assert_error(client.add(FERN, path='/metrics', authorization=ours), 40500)
    assert value_of(client, f'Bearer {TOKEN}') == 0
    assert value_of(client, f'Bearer {TOKEN}', '/metrics') == 40101
    assert value_of(client, None, '/metrics') == 40100
    for other in ('/plants', '/nowhere', '/', '/metrics2', '/metrics/', '/Metrics'):
        assert value_of(client, ours, other) == 40101
    assert value_of(serve_tokens(TOKEN), f'Bearer {TOKEN}', '/metrics') == 40400


def test_file_counts_when_it_has_not_changed_for_a_moment(path, monkeypatch, caplog):
    """Half of a token is never accepted, at a start and later; a change soon is."""
    caplog.set_level('INFO')
    now, age, half = 0, 2, OTHER[:-5]
    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda _: path.touch())
    clock.time = lambda: path.stat().st_ctime + age
    monkeypatch.setattr(module, 'time', clock)
    monkeypatch.setattr(TokensFile, 'CHECK_EVERY', 1)
    tokens = TokensFile(path)
    for text in ('', f'{OTHER}\n', half, f'{OTHER}\nb {half}', f'{OTHER}\nb {TOKEN}'):
        now, age = now + 1, 1.9
        path.write_text(text)
        os.utime(path, (0, 0))  # as a copy that keeps the time
        with pytest.raises(ValueError, match='all the time'):
            TokensFile(path)
        assert [tokens.find(one) for one in (TOKEN, OTHER, half)] == ['old', None, None]
    now, age = now + 0.9, 2
    assert tokens.find(OTHER) is None  # looked at once a second
    now += 0.1
    assert tokens.find(OTHER) == 'token-1'
    for text, new_age in ('a b c', 2), (half, 1), (half, -1), (half, -60):  # of others
        path.write_text(text)
        now, age = now + 1, new_age
        tokens.refresh()
    assert [tokens.find(one) for one in (OTHER, half)] == [None, 'token-1']
    assert [each.levelname for each in caplog.records] == ['INFO', 'ERROR', 'INFO']


def replaced(text):
    """Return a function that puts a text into the tokens file."""
    return lambda path: path.write_text(text, 'latin-1')


def replace(path, token):
    """Replace the tokens file, whatever it is, by one with a token."""
    if path.is_dir():
        path.rmdir()
    whole = path.with_name('whole')
    whole.write_text(f'new {token}\n')
    os.utime(whole, (0, 0))  # as a copy that keeps the times
    whole.rename(path)


# What is done to the file, and what the message says then.
DAMAGE = {
    'removed': (lambda path: path.unlink(), ''),
    'a FIFO': (lambda path: (path.unlink(), os.mkfifo(path)), 'not a regular file'),
    'a directory': (lambda path: (path.unlink(), path.mkdir()), 'not a regular file'),
    'of 1 GiB': (lambda path: os.truncate(path, 2**30), 'at most 1048576 bytes'),
    'empty': (replaced(''), 'no token'),
    'not UTF-8': (replaced(f'{OTHER}\n\xff\n'), ''),
    'bad token': (replaced(f'{OTHER}\n\n# comment\nb {OTHER} metrics\n'), 'line 4'),
    'for metrics': (replaced(f'{OTHER}\nfor-metrics'), 'token-2: it is PLANTS_M'),
}


@table('damage, message', DAMAGE)
def test_broken_tokens_file_keeps_the_old_tokens(damage, message, path, caplog):
    """A tokens file that cannot be used changes nothing; it is logged and counted."""
    client = serve_tokens(TokensFile(path), metrics_token='for-metrics')
    damage(path)
    with pytest.raises(ValueError, match=f'.*{message}') as raised:
        TokensFile(path).refuse('for-metrics')
    for _ in range(3):
        assert value_of(client, f'Bearer {TOKEN}') == 0
        assert value_of(client, f'Bearer {OTHER}') == 40101
    [record] = caplog.records
    assert record.levelname == 'ERROR'
    assert str(raised.value) in record.message
    replace(path, OTHER)
    assert value_of(client, f'Bearer {OTHER}') == 0
    assert value_of(client, f'Bearer {TOKEN}') == 40101
    assert_shows_no_token(caplog.text)
    metrics = client.get('/metrics', headers={'Authorization': 'Bearer for-metrics'})
    assert 'plants_token_reload_failures_total 1.0\n' in metrics.text


def test_file_that_cannot_be_read_may_revoke_all(path, monkeypatch):
    """No token is accepted until it was read: a moment without a free descriptor."""
    with monkeypatch.context() as patch:  # a start waits for a lease, of Samba
        lease = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        patch.setattr(os, 'open', Mock(side_effect=[lease, os.open(path, os.O_RDONLY)]))
        patch.chdir(path.parent)  # only now
        file = TokensFile(path.relative_to(path.parent))
        client = serve_tokens(file, metrics_token='for-metrics')
    replace(path, OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'open', Mock(side_effect=OSError(errno.EMFILE, 'no file')))
        both = client.add(FERN, authorization=f'Bearer {TOKEN}'), client.get('/readyz')
        assert ['no file' in assert_error(each, 50300) for each in both] == [True] * 2
        assert 'plants_store_ready 0.0' in read_metrics(client)
    assert value_of(client, f'Bearer {OTHER}') == 0
    assert value_of(client, f'Bearer {TOKEN}') == 40101


def test_look_while_the_file_changes_is_in_vain(path, monkeypatch):
    """Half a file is not read, nor a FIFO, nor what a link led to for a moment."""
    really, aside = os.open, path.with_name('aside')
    aside.write_text(OTHER)

    def slowly(*arguments):
        number = really(*arguments)
        patch.undo()
        replace(path, OTHER)
        assert tokens.find(OTHER)  # as another thread would
        return number

    for change, accepted in [
        (lambda *arguments: path.write_text(OTHER) and really(*arguments), TOKEN),
        (lambda *_: really(aside, os.O_RDONLY), TOKEN),
        (lambda *arguments: DAMAGE['a FIFO'][0](path) and really(*arguments), TOKEN),
        (slowly, OTHER),
    ]:
        replace(path, TOKEN)
        tokens = TokensFile(path)
        replace(path, TOKEN[::-1])
        with monkeypatch.context() as patch:
            patch.setattr(os, 'open', change)
            in_threads(tokens.refresh)
        tokens.refresh = int  # no other look
        assert [x for x in (TOKEN, TOKEN[::-1], OTHER) if tokens.find(x)] == [accepted]


def test_older_file_counts_at_once_when_a_link_leads_to_it_again(path):
    """Another process has read the one between; who had the older one goes on."""
    link, aside = path.with_name('link'), path.with_name('aside')
    aside.write_text(OTHER)
    link.symlink_to(path)
    other = copy.copy(tokens := TokensFile(link))  # as a forked child has it
    for file, each, token in (aside, other, OTHER), (path, tokens, TOKEN):
        link.unlink()
        link.symlink_to(file)
        assert each.find(token)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_failure_at_any_instruction_of_a_look(path):
    """Whatever fails in a look, the next one takes the change up."""
    for point in itertools.count():
        replace(path, TOKEN)
        tokens, points = TokensFile(path), itertools.count()

        def fail(frame, event, argument, point=point, points=points):
            if argument is not sys.setprofile and next(points) == point:
                raise MemoryError

        replace(path, TOKEN[::-1])
        sys.setprofile(fail)
        try:
            found = tokens.find(TOKEN)
        except (MemoryError, Fault):
            found = None
        finally:
            sys.setprofile(None)
        assert [tokens.find(one) for one in (TOKEN[::-1], TOKEN)] == ['new', None]
        if next(points) <= point:
            break
    assert (point > 50, found) == (True, None)


def test_revoked_token_stays_revoked(path, tmp_path):
    """A new worker does not bring it back, whatever has become of the file since."""
    fast = ['from web.tokens import TokensFile', 'TokensFile.CHECK_EVERY = 0.05']
    how = {'PLANTS_TOKENS': None, 'PLANTS_TOKENS_FILE': str(path), 'conf': fast}
    with Server(tmp_path, PLANTS_METRICS_TOKEN='for-metrics', **how) as server:

        def status(token):
            bearer = f'Bearer {token}'
            return server.ask(request(body=FERN, authorization=bearer)).status

        def replace_the_worker():
            old = only_worker(server)
            os.kill(old, signal.SIGKILL)
            wait_until(lambda: server.worker_pids() - {old})

        replace(path, OTHER)
        wait_until(lambda: status(OTHER) == 200)
        for kind in 'removed', 'bad token':
            DAMAGE[kind][0](path)
            replace_the_worker()
            for _ in range(5):
                assert status(TOKEN) in (401, 503)
            replace(path, OTHER)
            wait_until(lambda: status(OTHER) == 200)
        replace_the_worker()  # before it is forked, the master reads the file
        path.unlink()
        replace_the_worker()
        assert status(OTHER) == 200
        assert status(TOKEN) == 401
        read = request('GET', '/metrics', authorization='Bearer for-metrics')
        [total] = re.findall(rb'\nplants_token_\w+_total (.+)', server.ask(read).body)
        assert float(total) > 2, 'also those of workers that are dead'
    assert_shows_no_token(server.log)
