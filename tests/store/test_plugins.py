"""Stores that installed packages offer through an entry point; broken packages."""

import re
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


def install(directory, name, stores, source=''):
    """Install a package of one module that offers stores: entry point by scheme."""
    sys.modules.pop(name, None)  # another test may have had one with this name
    (directory / f'{name}.py').write_text(source)
    metadata = directory / f'{name}-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Name: {name}\nVersion: 1.0\n')
    lines = [f'{scheme} = {entry}' for scheme, entry in stores.items()]
    (metadata / 'entry_points.txt').write_text('\n'.join([f'[{GROUP}]', *lines, '']))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of installed packages, for this process and for its children."""
    site = tmp_path / 'site'
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv('PYTHONPATH', f'{site}:{REPOSITORY}')
    return site


def test_example_passes_the_contract(site, tmp_path, monkeypatch):
    """Its tests pass somewhere else, beside a copy of the contract."""
    project = tomllib.loads((EXAMPLE / 'pyproject.toml').read_text())
    (module,) = project['tool']['setuptools']['py-modules']
    source = (EXAMPLE / f'{module}.py').read_text()
    install(site, module, project['project']['entry-points'][GROUP], source)
    kit = shutil.copytree(EXAMPLE, tmp_path / 'kit')
    shutil.copy(REPOSITORY / 'tests/store/contract.py', kit)
    # An author need not have the plugins that our tests use.
    monkeypatch.setenv('PYTEST_DISABLE_PLUGIN_AUTOLOAD', '1')
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '.']
    done = finished([*command, '-W', 'error'], cwd=kit, timeout=6 * PATIENCE)
    assert done.returncode == 0, done.stdout
    assert ' passed' in done.stdout
    assert 'skipped' not in done.stdout


# The entry point, the source of a package, and what is told of it.
STORE, FULL = 'def Store(url, **_):', 'StoreUnavailable("full")'
WRONG = {
    'no-module': ('gone:Store', '', 'trees: .*gone'),
    'part': ('trees:Store', f'{STORE} int(url.split("@")[0][11:])', 'trees: .*base 10'),
    'store': ('trees:Store', f'from store import *\n{STORE} raise {FULL}', '^full$'),
}


@table('entry, source, message', WRONG)
def test_package_that_makes_no_store_is_named(site, entry, source, message):
    """The error names the scheme and the reason, and shows no password."""
    install(site, 'trees', {'trees': entry}, source)
    url = 'trees://me:secret@host'  # in a line that no traceback shows
    with pytest.raises((ValueError, StoreUnavailable), match=message) as caught:
        open_store(url)
    assert 'secret' not in ''.join(traceback.format_exception(caught.value))


def test_scheme_that_no_or_two_packages_offer_is_refused(site):
    """The message lists the known schemes, with their packages."""
    install(site, 'more', {'shrubs': 'more:Shrubs', 'herbs': 'more:Herbs'})
    install(site, 'oaks', {'herbs': 'oaks:Store'}, 'Store = 3')
    told = r'memory:.*jsonl:.*postgresql:.*shrubs: \(more:Shrubs\).*herbs'
    for url in 'trees:x', 'shrubs', 'herbs:x':
        with pytest.raises(ValueError, match=told):
            open_store(url)


def test_missing_psycopg_is_named(site, monkeypatch):
    """Without psycopg, or its [binary], the package is named as pip takes it."""
    names = re.findall(r'\b(?:store\.postgresql|psycopg)\b\S*\b', ' '.join(sys.modules))
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    install(site, 'psycopg', {}, 'raise ImportError("no pq wrapper")')
    with pytest.raises(ValueError, match=r'psycopg\[binary\]'):
        open_store('postgresql://psycopg:secret@binary/plants')
