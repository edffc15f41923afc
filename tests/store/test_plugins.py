"""Stores that installed packages offer through an entry point; broken packages."""

import runpy
import shutil
import sys
import tomllib
import traceback

import pytest
from exchange import table
from server import GUNICORN, PATIENCE, REPOSITORY, SCRIPTS, Server, finished, request
from waiting import in_threads, wait_until

from store import Plant, StoreUnavailable, open_store

EXAMPLE = REPOSITORY / 'docs/example_store'
GROUP = 'plant_store.stores'
KNOWN = 'is not a store: use memory:, jsonl:PATH, or postgresql://...; installed '


def install(directory, name, stores, source='', group=GROUP):
    """Install a package of one module that offers stores: entry point by scheme."""
    sys.modules.pop(name, None)  # another test may have had one with this name
    (directory / f'{name}.py').write_text(source)
    metadata = directory / f'{name}-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Name: {name}\nVersion: 1.0\n')
    lines = [f'{scheme} = {entry}' for scheme, entry in stores.items()]
    (metadata / 'entry_points.txt').write_text('\n'.join([f'[{group}]', *lines, '']))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of installed packages, for this process and for its children."""
    site = tmp_path / 'site'
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv('PYTHONPATH', f'{site}:{REPOSITORY}')
    return site


@pytest.fixture
def example(site):
    """Install the example, as its pyproject.toml says."""
    project = tomllib.loads((EXAMPLE / 'pyproject.toml').read_text())
    (module,) = project['tool']['setuptools']['py-modules']
    source = (EXAMPLE / f'{module}.py').read_text()
    install(site, module, project['project']['entry-points'][GROUP], source)


MISSING, FORK = 'missing_store_is_made_by_its_first_use', 'store_works_after_a_fork'
# Methods that break the example: the test of the kit that fails, and what it says.
BROKEN = {
    'constructor makes the file': (
        *(MISSING, 'the constructor must make no'),
        """
        def __init__(self, url, **options):
            super().__init__(url, **options)
            self.path.touch()
        """,
    ),
    'never makes it': (
        *(MISSING, "nor a use with create='never'"),
        """
        def __init__(self, url, *, create, scheduler):
            super().__init__(url, create='first', scheduler=scheduler)
        """,
    ),
    'check makes it': (
        *(MISSING, 'check_opening must make no'),
        """
        def check_opening(self):
            if self._create == 'first':
                self.ping()
        """,
    ),
    'password is shown': (
        *('wrong_url_is_not_repeated', 'must not repeat the URL'),
        """
        def __init__(self, url, **options):
            if '@' in url:
                raise ValueError(f'{url}: this is wrong')
            super().__init__(url, **options)
        """,
    ),
    'scheduler is not used': (
        *('scheduler_calls_what_blocks', 'scheduler.call was not called'),
        """
        def add(self, plant):
            return self._add(plant)
        """,
    ),
    'all plants are new': (
        *('add_many_is_like_add', "diff: True != 'id: 5 is taken"),
        """
        def add_many(self, plants):
            super().add_many(plants)
            return [True] * len(plants)
        """,
    ),
    'connection is kept': (
        *(FORK, 'a child failed'),
        """
        @contextmanager
        def _database(self):
            if not hasattr(self, 'kept'):
                self.kept = sqlite3.connect(self.path, check_same_thread=False)
                self.kept.execute(TABLE)
            with self.kept:
                yield self.kept

        def close(self):
            super().close()
            self.kept.close()
        """,
    ),
}


@pytest.mark.usefixtures('example')
class TestExample:
    def test_its_tests_pass(self, tmp_path, monkeypatch):
        """The tests in the directory pass as they stand, somewhere else."""
        kit = shutil.copytree(EXAMPLE, tmp_path / 'kit')
        # Without those that our tests use: an author need not have them.
        monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
        command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '.']
        done = finished(command, cwd=kit, timeout=6 * PATIENCE)
        assert done.returncode == 0, done.stdout
        assert ' passed' in done.stdout
        assert 'skipped' not in done.stdout

    @pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
    @table('test, fault, methods', BROKEN)
    def test_its_tests_find_broken_promises(self, site, tmp_path, test, fault, methods):
        """A test of the kit fails; pytest shows its promise, the docstring."""
        source = 'from plants_in_sqlite import *\nclass Broken(SQLiteStore):' + methods
        install(site, 'broken', {'broken': 'broken:Broken'}, source)
        kit = runpy.run_path(EXAMPLE / 'test_plants_in_sqlite.py')['TestSQLiteStore']()
        others = {MISSING: [tmp_path], FORK: [True]}.get(test, [])
        with (
            open_store(f'broken:{tmp_path}/plants.db') as store,
            pytest.raises((AssertionError, pytest.fail.Exception)) as caught,
        ):
            getattr(kit, f'test_{test}')(store, *others)
        assert fault in str(caught.value)
        promise = getattr(kit, f'test_{test}').__doc__.splitlines()[0]
        assert promise in str(caught.getrepr())

    def test_server_serves_it(self, tmp_path):
        """PLANTS_STORE may name a store of another package; workers share it."""
        url = f'sqlite:{tmp_path}/plants.db'
        # A script, not GUNICORN: Python reads PYTHONPATH when it is started.
        command = [SCRIPTS / 'gunicorn', *GUNICORN[3:]]
        with Server(tmp_path, command=command, PLANTS_STORE=url, workers=2) as server:
            for _ in range(4):
                answer = server.ask(request(body={'id': 1, 'name': 'Fern'}))
                assert (answer.status, answer.json) == (200, {'name': 'Fern'})
            answer = server.ask(request(body={'id': 1, 'name': 'Moss'}))
            assert (answer.status, answer.json['error']) == (400, 40006)
        with open_store(url, create='never') as store:
            assert list(store) == [Plant(1, 'Fern')]


# Of packages that offer trees: the entry point, the source, and what is told.
STORE, RAISES = 'def Store(url, **_):', 'trees:Store raised '
SECRET = 'url.split(":")[2].split("@")[0]'
WRONG = {
    'no-module': ('gone:Store', '', "No module named 'gone'"),
    'raises': ('', '1 / 0', f'{RAISES}ZeroDivisionError'),
    'parameters': ('', 'def Store(url): ...', f'{RAISES}TypeError'),
    'url': ('', f'{STORE} raise ValueError("no colour")', 'no colour'),
    'repeated': ('', f'{STORE} raise ValueError(url)', f'{RAISES}ValueError'),
    'other': ('', f'{STORE} raise OSError("secret", url)', f'{RAISES}OSError'),
    'int': ('', f'{STORE} int({SECRET})', f'{RAISES}ValueError'),
}


class TestRefused:
    def test_unknown_scheme_is_refused(self, site):
        """An unknown scheme is refused; the message lists the known schemes."""
        with pytest.raises(ValueError, match=f'^it {KNOWN}packages offer no oth'):
            open_store('trees:x')
        install(site, 'others', {'trees': 'nowhere:x'}, group='console_scripts')
        install(site, 'more', {'shrubs': 'more:Shrubs', 'herbs': 'more:Herbs'})
        for url in ('trees:x', 'shrubs', ''):
            sentence = f'^it {KNOWN}packages offer shrubs:, herbs:$'
            with pytest.raises(ValueError, match=sentence):
                open_store(url)

    def test_built_in_scheme_is_not_replaced(self, site):
        """A package cannot replace a built-in store."""
        install(site, 'mine', {'memory': 'mine:Store'}, 'Store = None')
        with open_store('memory:') as store:
            assert list(store) == []

    @table('entry, source, message', WRONG)
    def test_broken_package_is_named(self, site, run, entry, source, message):
        """The error names the package and the reason, and shows no password."""
        install(site, 'trees', {'trees': entry or 'trees:Store'}, source)
        url = 'trees://me:secret@host'
        with pytest.raises(ValueError, match=f'^trees: package trees: {message}') as it:
            open_store(url)
        shown = ''.join(traceback.format_exception(it.value))
        assert 'secret' not in shown.replace(url, '')
        code, output, errors = run('count', url)
        assert (code, output) == (2, b'')
        assert f'trees: package trees: {message}' in errors[-1]

    def test_store_that_cannot_be_made_says_so(self, site):
        """An error of the store itself is none of the package."""
        source = f'from store import *\n{STORE} raise StoreUnavailable("full")'
        install(site, 'trees', {'trees': 'trees:Store'}, source)
        with pytest.raises(StoreUnavailable, match='full'):
            open_store('trees:x', create='always')

    def test_scheme_of_two_packages_is_refused(self, site):
        """A scheme that two packages offer is refused; the message names both."""
        for name in ('birches', 'oaks'):
            install(site, name, {'trees': f'{name}:Store'}, 'Store = 3')
        sentence = 'trees: package birches and package oaks offer this'
        with pytest.raises(ValueError, match=sentence):
            open_store('trees:x')


def test_missing_psycopg_is_named(monkeypatch):
    """Without psycopg a PostgreSQL URL is refused; the message names the package."""
    monkeypatch.delattr('store.postgresql', raising=False)
    monkeypatch.setitem(sys.modules, 'store.postgresql', None)
    with pytest.raises(ValueError, match=r'it needs the package psycopg\[binary\]'):
        open_store('postgresql://me:secret@host/plants')


def test_helpers_of_the_kit_fail():
    """An error in a thread fails a test, and a wait has an end."""
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda: 1 / 0)
    with pytest.raises(AssertionError, match=r'it holds: not within 0\.1 s'):
        wait_until(bool, seconds=0.1)
