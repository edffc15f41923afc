"""Stores that installed packages offer through an entry point; broken packages."""

import shutil
import sys
import tomllib
import traceback

import pytest
from exchange import table
from server import PATIENCE, REPOSITORY, finished

from store import StoreUnavailable, open_store

EXAMPLE = REPOSITORY / 'docs/example_store'
GROUP = 'plant_store.stores'


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


@pytest.mark.usefixtures('example')
def test_example_passes_the_contract(tmp_path, monkeypatch):
    """Its tests pass somewhere else, beside a copy of the contract."""
    kit = shutil.copytree(EXAMPLE, tmp_path / 'kit')
    shutil.copy(REPOSITORY / 'tests/store/contract.py', kit)
    # An author need not have the plugins that our tests use.
    monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '.']
    done = finished([*command, '-W', 'error'], cwd=kit, timeout=6 * PATIENCE)
    assert done.returncode == 0, done.stdout
    assert ' passed' in done.stdout
    assert 'skipped' not in done.stdout


# Of packages that offer trees: the entry point, the source, and what is told.
STORE = 'def Store(url, **_):'
SECRET = 'url.split(":")[2].split("@")[0]'
WRONG = {
    'no-module': ('gone:Store', '', 'gone'),
    'raises': ('', '1 / 0', 'division by zero'),
    'parameters': ('', 'def Store(url): ...', 'keyword argument'),
    'url': ('', f'{STORE} raise ValueError("no colour")', 'no colour'),
    'repeated': ('', f'{STORE} raise ValueError(url)', ''),
    'other': ('', f'{STORE} raise OSError("secret", url)', ''),
    'int': ('', f'{STORE} int({SECRET})', 'base 10'),
}


class TestRefused:
    def test_unknown_scheme_is_refused(self, site):
        """An unknown scheme is refused; the message lists the known schemes."""
        install(site, 'others', {'trees': 'nowhere:x'}, group='console_scripts')
        install(site, 'more', {'shrubs': 'more:Shrubs', 'herbs': 'more:Herbs'})
        for url in 'trees:x', 'shrubs', '':
            known = r'memory:.*jsonl:PATH.*postgresql://.*shrubs:.*herbs:'
            with pytest.raises(ValueError, match=known):
                open_store(url)

    @table('entry, source, message', WRONG)
    def test_broken_package_is_named(self, site, run, entry, source, message):
        """The error names the scheme and the reason, and shows no password."""
        install(site, 'trees', {'trees': entry or 'trees:Store'}, source)
        url = 'trees://me:secret@host'
        with pytest.raises(ValueError, match=f'^trees: .*{message}') as caught:
            open_store(url)
        shown = ''.join(traceback.format_exception(caught.value))
        assert 'secret' not in shown
        code, output, errors = run('list', url)
        assert (code, output) == (2, b'')
        assert message in errors[-1]

    def test_store_that_cannot_be_made_says_so(self, site):
        """An error of the store itself is none of the package."""
        source = f'from store import *\n{STORE} raise StoreUnavailable("full")'
        install(site, 'trees', {'trees': 'trees:Store'}, source)
        with pytest.raises(StoreUnavailable, match='full'):
            open_store('trees:x')

    def test_scheme_of_two_packages_is_refused(self, site):
        """A scheme that two packages offer is refused; the message names both."""
        for name in 'birches', 'oaks':
            install(site, name, {'trees': f'{name}:Store'}, 'Store = 3')
        with pytest.raises(ValueError, match=r'(birches|oaks).*(birches|oaks)'):
            open_store('trees:x')


def test_missing_psycopg_is_named(monkeypatch):
    """Without psycopg a PostgreSQL URL is refused; the message names the package."""
    for name in [it for it in sys.modules if it.startswith('store.postgresql')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'psycopg', None)
    with pytest.raises(ValueError, match='psycopg'):
        open_store('postgresql://me:secret@host/plants')
