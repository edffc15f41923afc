"""Stores that installed packages offer through an entry point; broken packages.

The example is ``sqlite_package.py``, installed as by pip: a module, and a directory
with its metadata, on the search path of Python.
"""

import sqlite3
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cli import command
from server import GUNICORN, PATIENCE, SCRIPTS, RawClient, Server, request

from store import Plant, check_url, open_store
from store.testing import StoreContract

KNOWN = 'is not a store: use memory:, jsonl:PATH, or postgresql://...; installed '


def install(directory, name, entry_points, source='', group='plant_store.stores'):
    """Install a package of one module."""
    (directory / f'{name}.py').write_text(source)
    metadata = directory / f'{name}-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n'
    )
    (metadata / 'entry_points.txt').write_text(
        '\n'.join([f'[{group}]', *entry_points, ''])
    )


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of installed packages, for this process and for its children."""
    site = tmp_path / 'site'
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv('PYTHONPATH', str(site))
    before = set(sys.modules)
    yield site
    # Another test may install other packages with the same names.
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], '__file__', None) or '').startswith(str(site)):
            del sys.modules[name]


@pytest.fixture
def package(site):
    """Install the example package, with the SQLite store."""
    source = Path(__file__).with_name('sqlite_package.py').read_text()
    install(site, 'plants_in_sqlite', ['sqlite = plants_in_sqlite:SQLiteStore'], source)


@pytest.mark.usefixtures('package')
class TestSQLiteStore(StoreContract):
    """A store of another package passes the contract suite."""

    @pytest.fixture
    def store(self, tmp_path):
        with open_store(f'sqlite:{tmp_path}/plants.db') as store:
            yield store

    def raw_plants(self, store):
        with closing(sqlite3.connect(store.path)) as database:
            table = database.execute("SELECT 1 FROM sqlite_master WHERE name='plants'")
            rows = database.execute('SELECT * FROM plants') if table.fetchone() else []
            return [Plant(*row) for row in rows]

    def url(self, store):
        return store.url

    @contextmanager
    def unavailable(self, store):
        kept = store.path.read_bytes()
        store.path.write_bytes(b'not a database ' * 1000)
        yield
        store.path.write_bytes(kept)


@pytest.mark.usefixtures('package')
class TestUse:
    def test_server_serves_it(self, tmp_path):
        """PLANTS_STORE may name a store of another package; workers share it."""
        url = f'sqlite:{tmp_path}/plants.db'
        # A script, not GUNICORN: Python reads PYTHONPATH when it is started.
        command = [SCRIPTS / 'gunicorn', *GUNICORN[3:]]
        with Server(tmp_path, command=command, PLANTS_STORE=url, workers=2) as server:
            for _ in range(4):
                with RawClient(server.port) as client:
                    answer = client.ask(request(body={'id': 1, 'name': 'Fern'}))
                    assert (answer.status, answer.json) == (200, {'name': 'Fern'})
            with RawClient(server.port) as client:
                answer = client.ask(request(body={'id': 1, 'name': 'Moss'}))
                assert (answer.status, answer.json['error']) == (400, 40006)
        with open_store(url, create='never') as store:
            assert list(store) == [Plant(1, 'Fern')]

    def test_command_line_copies_to_and_from_it(self, tmp_path):
        """The command line copies plants to the store of another package, and back."""
        there, back = tmp_path / 'there.jsonl', tmp_path / 'back.jsonl'
        there.write_text(''.join(f'{{"id":{id},"name":"Fern"}}\n' for id in range(250)))
        url = f'sqlite:{tmp_path}/plants.db'
        for arguments in [('copy', there, url), ('copy', url, back), ('check', url)]:
            with command(*arguments) as process:
                output, errors = process.communicate(timeout=PATIENCE)
            assert (process.returncode, errors) == (0, b'')
        assert output == b'250 plants verified, no damage\n'
        assert back.read_bytes() == there.read_bytes()

    def test_missing_store_is_not_made_by_a_reader(self, tmp_path, run):
        """A command that reads reports that the store is missing."""
        code, _, (error,) = run('list', f'sqlite:{tmp_path}/plants.db')
        assert code == 1
        assert error == f'Error: {tmp_path}/plants.db: unable to open database file'
        assert not (tmp_path / 'plants.db').exists()


class TestRefused:
    def test_unknown_scheme(self, site):
        """An unknown scheme is refused; the message lists the known schemes."""
        with pytest.raises(ValueError, match=f"'trees:x' {KNOWN}packages offer no oth"):
            open_store('trees:x')
        install(site, 'others', ['trees = nowhere:x'], group='console_scripts')
        install(site, 'more', ['shrubs = more:Shrubs', 'herbs = more:Herbs'])
        for url in ('trees:x', 'shrubs', ''):
            for function in (check_url, open_store):
                with pytest.raises(
                    ValueError, match=f"'{url}' {KNOWN}packages offer shrubs:, herbs:$"
                ):
                    function(url)

    def test_built_in_scheme_is_not_replaced(self, site):
        """A package cannot replace a built-in store."""
        names = ['memory', 'jsonl', 'postgresql', 'postgres']
        install(site, 'mine', [f'{name} = mine:Store' for name in names])
        for url in ('memory:x', 'jsonl:', 'postgresql:x', 'postgres:x'):
            with pytest.raises(ValueError, match=f'{KNOWN}packages offer no other'):
                open_store(url)

    @pytest.mark.parametrize(
        ('entry', 'source', 'message'),
        [
            ('gone:Store', '', "ModuleNotFoundError: No module named 'gone'"),
            ('trees:Store', '', "AttributeError: module 'trees' has no .* 'Store'"),
            ('trees:Store', '1 / 0', 'ZeroDivisionError: division by zero'),
            ('trees:Store', 'Store = (', 'SyntaxError: .*'),
        ],
        ids=['no-module', 'no-name', 'raises', 'syntax'],
    )
    @pytest.mark.parametrize('function', [check_url, open_store])
    def test_package_does_not_load(self, site, function, entry, source, message):
        """The error names the package that does not load, and the reason."""
        install(site, 'trees', [f'trees = {entry}'], source)
        with pytest.raises(
            ValueError,
            match=f"'trees:x': package trees: {entry} does not load: {message}",
        ):
            function('trees:x')

    @pytest.mark.parametrize(
        ('source', 'message'),
        [
            ('def Store(url): ...', r"Store\(\) got an unexpected keyword .*'create'"),
            ('def Store(url, **options): ...', 'trees:Store returned a NoneType, not'),
            ('Store = 3', "'int' object is not callable"),
            ('def Store(url, **options): raise ValueError("no colour")', 'no colour'),
        ],
        ids=['parameters', 'result', 'not-callable', 'url'],
    )
    def test_package_does_not_open_its_store(self, site, source, message):
        """The error names the package whose function breaks the rules."""
        install(site, 'trees', ['trees = trees:Store'], source)
        check_url('trees://me:secret@host')
        with pytest.raises(ValueError, match=f'package trees: {message}') as caught:
            open_store('trees://me:secret@host')
        assert str(caught.value).startswith("'trees://***@host': ")

    def test_scheme_of_two_packages(self, site):
        """A scheme that two packages offer is refused; the message names both."""
        for name in ('birches', 'oaks'):
            install(site, name, [f'trees = {name}:Store'], 'Store = 3')
        with pytest.raises(
            ValueError, match=r"'trees:x': package birches and package oaks offer this"
        ):
            check_url('trees:x')

    def test_command_line_reports_a_broken_package(self, site, run):
        """The command line prints the same message, and exits with code 2."""
        install(site, 'trees', ['trees = gone:Store'])
        code, output, errors = run('count', 'trees:x')
        assert (code, output) == (2, b'')
        assert 'package trees: gone:Store does not load' in errors[-1]


def test_missing_psycopg_is_named(monkeypatch):
    """Without psycopg a PostgreSQL URL is refused; the message names the package."""
    monkeypatch.delattr('store.postgresql', raising=False)
    monkeypatch.setitem(sys.modules, 'store.postgresql', None)
    for function in (check_url, open_store):
        with pytest.raises(ValueError, match=r'it needs the package psycopg\[binary\]'):
            function('postgresql://me:secret@host/plants')
