"""The README and docs/ list all settings, errors and commands; examples work."""

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from conftest import TOKEN, Client
from postgresql import programs
from server import REPOSITORY, ROOMS, SCRIPTS, Server, finished, installed, request

import app
from serving.master import FIXED
from store import Plant, open_store
from store.jsonl.record import encode
from store.postgresql.table import CREATE
from web.errors import ErrorValue
from web.settings import VARIABLES

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [*REPOSITORY.glob('*.md'), *REPOSITORY.glob('docs/*.md')]
}
README = PAGES['README.md']
MAKEFILE = (REPOSITORY / 'Makefile').read_text()
RULES = REPOSITORY / 'deploy/prometheus/plants.rules.yml'
CODE = [path for name in ROOMS for path in REPOSITORY.glob(f'{name}/**/*.py')]
FERN, MOSS = Plant(1, 'Fern', 'shade'), Plant(2, 'Moss')


# ---- reading Markdown


def lines_of(page):
    """Yield each line of a page with its heading level; 0 is no heading."""
    is_code = False
    for line in PAGES[page].splitlines():
        is_code ^= line.startswith('```')
        yield line, 0 if is_code else len(re.match('#* ?', line)[0].rstrip())


def section(page, heading):
    """Return the text under a heading, up to the next one of its level or above."""
    found = []
    inside = 0
    for line, level in lines_of(page):
        if line == heading:
            inside = level
        elif level and level <= inside:
            inside = 0
        elif inside:
            found.append(line)
    assert found, f'{page}: there is no {heading}'
    return '\n'.join(found)


def blocks(text, language=''):
    """Return the blocks of code in a language."""
    found = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.M | re.S)
    return [code for marked, code in found if marked == language]


def block(page, heading, language=''):
    """Return the only block of code in a language under a heading."""
    [code] = blocks(section(page, heading), language)
    return code


def rows(text):
    """Return the rows of all tables, each as a list of cells, without header rows."""
    tables = re.findall(r'^\|.*\n\|[-|]+\n((?:\|.*\n?)+)', text, re.M)
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for table in tables
        for line in table.splitlines()
    ]


def quoted(cell):
    """Return the texts of a cell that are in backquotes."""
    return re.findall('`([^`]+)`', cell)


# ---- the pages


@pytest.mark.parametrize('page', PAGES)
def test_links_have_targets(page):
    """Each link is to a file that exists, and to a heading in it if it names one."""
    for link in re.findall(r'\]\(([^)]+)\)', PAGES[page]):
        if link.startswith('https://'):
            continue
        name, _, anchor = link.partition('#')
        path = REPOSITORY / page
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            titles = [
                line.strip('# ').lower()
                for line, level in lines_of(str(target.relative_to(REPOSITORY)))
                if level
            ]
            anchors = [re.sub(r'[^\w -]', '', t).replace(' ', '-') for t in titles]
            assert anchor in anchors, link


# ---- lists of names


def test_settings_are_listed():
    """Each variable has a row; the page names the settings that need a restart."""
    table = rows(section('README.md', '## Settings'))
    assert [quoted(cells[0])[0] for cells in table] == list(VARIABLES)
    fixed = re.search('variables, (.*?) stay those', PAGES['docs/operating.md'], re.S)[
        1
    ]
    assert set(quoted(fixed)) == set(FIXED)


def test_error_values_are_listed():
    """Each value has a row with its status and meaning, and each row is a value."""
    listed = [cells for cells in rows(README) if cells[0].isdigit()]
    for (value, status, meaning), known in zip(listed, ErrorValue, strict=True):
        assert (int(value), int(status)) == (known, known // 100)
        assert meaning.replace('`', '').startswith(known.meaning)


@pytest.mark.parametrize(
    ('page', 'heading'),
    [
        ('README.md', '## The request'),
        ('docs/api.md', '## Decisions'),
        ('docs/stores.md', '### The file format'),
        ('docs/databases.md', '## One table'),
    ],
)
def test_members_are_named(page, heading):
    """The pages that define a plant name each member."""
    text = section(page, heading)
    assert [name for name in Plant._fields if f'`{name}`' not in text] == []


def test_order_of_checks_has_each_error_value():
    """Each value has its place in the order, but for a fault that is unexpected."""
    order = section('docs/api.md', '## The order of checks')
    found = {int(digits) for digits in re.findall(r'\b[0-9]{5}\b', order)}
    assert found == {*ErrorValue} - {ErrorValue.INTERNAL}


def test_paths_are_listed(serve, store):
    """Each path is in the README and in ``app.py``; api.md says which need no token."""
    paths = serve(store, metrics=True).get('/openapi.json').json['paths']
    described = {(method.upper(), path) for path in paths for method in paths[path]}
    table = section('README.md', '## The answers')
    assert {*re.findall(r'^\| `([A-Z]+) (/.*?)`', table, re.M)} == described
    assert {*re.findall(r'^ +([A-Z]+) +(/[^ ]+)', app.__doc__, re.M)} == described
    order = ' '.join(section('docs/api.md', '## The order of checks').split())
    names = re.search('Only (.*) and the files of the page need no token', order)[1]
    assert {*quoted(names)} == {
        path for path in paths if 'security' in str(paths[path])
    }


def test_make_targets_are_listed():
    """Each target has a row, and each one that a page names exists."""
    [phony] = re.findall('^[.]PHONY: (.*)$', MAKEFILE, re.M)
    table = section('docs/developing.md', '# Developing')
    listed = re.findall(r'`make ?([\w-]*)`', '\n'.join(row[0] for row in rows(table)))
    assert sorted(target or 'all' for target in listed) == sorted(phony.split())
    named = re.findall(r'(?:`|\$ |^)make ([a-z-]+)', '\n'.join(PAGES.values()), re.M)
    assert set(named) <= set(phony.split())


def test_modules_are_listed_with_their_tests():
    """Each module has a row, and each module of tests is in one."""
    table = rows(section('docs/developing.md', '## The architecture on one screen'))
    rooms = [REPOSITORY / name for name in ROOMS if '.' not in name]
    modules = [path for room in rooms for path in room.rglob('[!_]*.py')]
    assert {REPOSITORY / quoted(cells[0])[0] for cells in table} >= {*modules}
    tests = REPOSITORY / 'tests'
    listed = {tests / name for cells in table for name in quoted(cells[2])}
    assert listed == {*tests.glob('[hs]*/test_*.py')}


def test_drawing_of_a_post_names_functions():
    """Each function of the drawing is in the module that stands before it."""
    drawing = block('docs/developing.md', '## The life of a POST')
    found = re.findall(r'^(\w\S+\.py)? +(\w+)\.?(\w+)?', drawing, re.M)
    module = ''
    for name, *path in found:
        module = name or module
        tree = ast.parse((REPOSITORY / module).read_text())
        for part in filter(None, path):
            nodes = (ast.FunctionDef, ast.ClassDef)
            inside = [node for node in tree.body if isinstance(node, nodes)]
            [tree] = [node for node in inside if node.name == part]
    assert len(found) > 15


def test_words_of_the_glossary_are_in_the_code():
    """Each word is in the code, where a reader may stop at it."""
    code = ' '.join(' '.join(path.read_text().split()) for path in CODE)
    for word, _ in rows(section('docs/developing.md', '## Glossary')):
        assert re.search(f'(?<![a-z]){word}'.replace(' ', '[ _]'), code), word


def test_files_of_recipes_and_claims_exist():
    """Each file that a recipe changes, and each test that shows a claim, exists."""
    table = rows(section('docs/developing.md', '## How to change it'))
    names = [quoted(cells[0])[0] for cells in table]
    claims = rows(README)[:4]
    names += [name for cells in claims for name in quoted(cells[1]) if '/' in name]
    assert [name for name in names if not (REPOSITORY / name).exists()] == []
    assert len(names) > 30


def test_log_lines_have_the_level_that_is_listed():
    """Each warning and error that the code logs has a row with its level."""

    def shortened(line):
        line = re.sub(r'%[sd]|\b[A-Z_]{2,}\b', 'X', line)
        return re.sub('X[X: ]*', 'X', line)

    logged = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(to, level), [ast.Constant(str(line)), *_]):
                    level = level.upper().replace('EXCEPTION', 'ERROR')
                    is_log = ast.unparse(to).endswith(('log', 'logger'))
                    if is_log and level in LEVELS and line != '%s':
                        logged.add((level, shortened(line)))
    table = rows(section('docs/operating.md', '### Log lines that ask for an action'))
    listed = {(level, shortened(line.strip('`'))) for level, line, _ in table}
    assert logged - listed == set()
    # The others are logged after a lock is released, by a start, and by gunicorn.
    others = ('Xremoved', 'Xthe index is opened', 'a sentence', 'X(pid')
    assert all(line.startswith(others) for _, line in listed - logged)


# What the code has: the page that promises it, the words, and the unit of the value.
PROMISED = {
    'serving.client.REQUEST_TIMEOUT': ('api', 'the end of its body | {} s |', 1),
    'serving.client.FIRST_REQUEST': ('api', 'is kept, also a new one | {} s;', 1),
    'serving.client.LINGER': ('api', '; {} s while its worker has all of its', 1),
    'serving.client.LINGER_RATE': ('api', 'that send more than {} KiB a second', 1024),
    'serving.client.MAX_WASTED': ('api', 'may come one by one | {}; ', 256),
    'serving.heads.MAX_HEAD': ('api', 'or the head is longer than {} KiB', 1024),
    'serving.heads.LONG_REST': ('api', 'if {} KiB or more of a body were left', 1024),
    'serving.master.CHECK_SECONDS': ('operating', 'passes within {} seconds', 1),
    'serving.master.BOOT_SECONDS': ('operating', 'them serve, within {} seconds', 1),
    'schemas.MAX_SHOWN_LENGTH': ('api', 'At most {} characters of a value', 1),
    'schemas.MAX_NUMBER_LENGTH': ('api', 'A number may have at most {} characters', 1),
    'web.settings.DEFAULT_MAX_BODY_BYTES': ('api', '`PLANTS_MAX_BODY`, {} bytes', 1),
    'store.group_commit.WAIT_WITHIN': ('stores', 'An add waits for {} sec', 1),
    'store.group_commit.BATCH_BYTES': ('developing', 'has at most {} MiB', 2**20),
    # Each of the syncs has one connection, and a probe another one.
    'store.group_commit.SLOW_SYNCS_IN_FLIGHT': ('stores', 'at most {} conn', 0.8),
    'store.__main__.WAIT': ('migrating', 'for up to {} seconds (`--wait`)', 1),
    'store.jsonl.record.LONGEST': ('stores', 'A record has at most {} MiB', 2**20),
    'store.postgresql.LOCKED_FOR': ('stores', 'repeats, for the next {} seconds', 1),
    'store.jsonl.lock.LOCK_WITHIN': ('stores', 'for the lock longer than {} sec', 1),
    'store.jsonl.recovery.MOST_TORN': ('stores', 'more than {} MiB would be', 2**20),
    'store.jsonl.index.TAIL': ('stores', 'in the last {} bytes before the mark', 1),
    'store.postgresql.connection.RESOLVE_WITHIN': ('stores', '{} to resolve', 1),
    'store.postgresql.connection.CONNECT_WITHIN': ('stores', '{} to connect to', 1),
    'store.postgresql.connection.ANSWER_WITHIN': ('stores', '{} until a statement', 1),
    'store.postgresql.connection.LOCK_WITHIN': ('stores', 'refused after {} sec', 0.5),
    'keepalive': ('deploying', 'keep connections for less than {} seconds', 1),
    'graceful_timeout': ('deploying', 'A stop may take {} seconds', 1),
    'worker_connections': ('api', 'connections of one worker | {};', 1),
}


@pytest.mark.parametrize(('name', 'promise'), PROMISED.items(), ids=PROMISED)
def test_limits_are_those_of_the_pages(name, promise):
    """A limit that a page promises is the one in the code."""
    page, words, unit = promise
    if '.' in name:
        module, _, name = name.rpartition('.')
        value = getattr(importlib.import_module(module), name)
    else:
        conf = (REPOSITORY / 'gunicorn.conf.py').read_text()
        value = int(re.search(f'^{name} = ([0-9_]+)$', conf, re.M)[1])
    shown = words.format(f'{value / unit:,.9g}')
    assert shown in ' '.join(PAGES[f'docs/{page}.md'].split())


def test_table_of_the_pages_is_the_one_that_is_made():
    """A table that is made by hand has the same columns and rules."""
    made = ' '.join(CREATE.format('plants').split())
    assert made in PAGES['docs/stores.md']
    assert made.replace(' IF NOT EXISTS', '') in PAGES['docs/databases.md']


def test_figure_of_the_readme_is_that_of_the_benchmarks():
    """The first screen of the README claims what a run has shown."""
    [figure] = re.findall('([0-9.]+ to [0-9.]+) times the adds', README)
    measured = ' '.join(PAGES['docs/benchmarks.md'].split())
    assert f'{figure} times as many as FastAPI or Flask + SQLite' in measured


def test_metrics_and_alerts_are_listed(serve, store):
    """Each metric and each alert has a row, and each row is one."""
    lines = serve(store, metrics=True).get('/metrics').text.splitlines()
    metrics = {line.split()[2] for line in lines if line.startswith('# TYPE')}
    metrics = {name for name in metrics if not name.endswith('_created')}
    rules = yaml.safe_load(RULES.read_text())['groups'][0]['rules']
    table = rows(section('docs/operating.md', '## Metrics and alerts'))
    names = {quoted(cells[0])[0] for cells in table}
    expected = {name for name in metrics if not re.match('process_|python_', name)}
    assert names == expected | {'process_...'} | {rule['alert'] for rule in rules}


# ---- what can be run


@pytest.fixture
def shell(checkout, tmp_path):
    """A function that runs a script in a checkout; it returns exit code and output."""
    (tmp_path / 'deploy').symlink_to(REPOSITORY / 'deploy')
    (tmp_path / '.venv').symlink_to(SCRIPTS.parent)
    (tmp_path / 'plants.jsonl').write_bytes(encode(FERN) + encode(MOSS))
    ours = {'PATH': f'{SCRIPTS}:{programs()}:{os.environ["PATH"]}'}
    ours |= {'HOME': str(tmp_path), 'WEB_CONCURRENCY': '2'}

    def run(script, **variables):
        command = ['bash', '-c', script]
        how = {'cwd': tmp_path, 'env': ours | variables, 'stderr': subprocess.STDOUT}
        done = finished(command, **how)
        return done.returncode, done.stdout.replace(str(tmp_path), '/srv')

    return run


LEVELS = ('WARNING', 'ERROR', 'CRITICAL')
DAMAGED = '### The plant file is damaged'


@pytest.mark.parametrize(
    'heading', ['## Start, stop, reload', '## The command line', DAMAGED]
)
def test_commands_print_what_is_shown(shell, tmp_path, heading):
    """The commands of operating.md print what the page shows."""
    if heading == DAMAGED:
        lines = [encode(FERN), b'{"id":3\n', encode(MOSS)]
        (tmp_path / 'plants.jsonl').write_bytes(b''.join(lines))
    shown = block('docs/operating.md', heading, 'console')
    lines = []
    for command in re.findall(r'^\$ (.*(?:(?<=\\)\n.*)*)', shown, re.M):
        lines += ["cat <<'COMMAND'", f'$ {command}', 'COMMAND', command]
    # What a terminal shows when the commands are typed.
    assert shell('\n'.join(lines))[1] == shown


def test_first_request_is_answered_as_shown(tmp_path):
    """The command at the top of the README prints the answer below it."""
    curl = installed('curl', 'curl')
    command, shown = re.fullmatch(
        r'\$ curl (.*)\n(\{.*\})\n', blocks(README, 'console')[0], re.S
    ).groups()
    with Server(tmp_path) as server:
        command = command.replace(':8000', f':{server.port}').replace('TOKEN', TOKEN)
        command = f'{curl} --silent {command}'
        done = finished(command, shell=True)
    assert done.stdout == shown


def test_readme_example_makes_an_application(tmp_path, monkeypatch):
    """The Python example of the README makes an application."""
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(blocks(README, 'python')[0], names)
    client = Client(names['application'], 'TOKEN')
    assert client.add({'id': 1, 'name': 'Fern'}).json == {'name': 'Fern'}


# ---- the pages for embedders and authors


def python(code, directory, *path):
    """Run a program in a directory of its own; return what it prints."""
    search = ':'.join(map(str, path or [REPOSITORY]))
    environment = {'PATH': os.environ['PATH'], 'PYTHONPATH': search}
    done = finished([sys.executable, '-c', code], cwd=directory, env=environment)
    assert (done.returncode, done.stderr) == (0, ''), done.stderr
    return done.stdout


# A client of the application in host.py. WebTest checks its answers as WSGI.
ASK = """
from webtest import TestApp
from host import application

client = TestApp(application, {'HTTP_AUTHORIZATION': 'Bearer TOKEN'})
ADD = {'method': 'POST', 'body': b'{"id": 1, "name": "Fern"}'}

def ask(path, **how):
    headers = {'Content-Type': 'application/json'}
    return client.request(path, headers=headers, expect_errors=True, **how).text
"""
USE_HOST = f"""{ASK}
print(ask('/'))
print(ask('/garden/plants', **ADD))
print(ask('/garden/plants'))
print('status' in ask('/livez'))
for path in ('/garden', '/garden/'):
    html = dict(Accept='text/html')
    page = TestApp(application).get(path, headers=html).maybe_follow(headers=html)
    print(page.request.path, page.content_type)
"""


@pytest.mark.parametrize('host', ['a WSGI program', 'Flask', 'Django', 'Pyramid'])
def test_host_serves_plants(tmp_path, host):
    """Each host serves its own page, and plants under the prefix."""
    if host == 'Pyramid':
        pytest.importorskip('pyramid')
    code = block('docs/embedding.md', f'## In {host}', 'python')
    (tmp_path / 'host.py').write_text(code)
    printed = python(USE_HOST, tmp_path, REPOSITORY, tmp_path)
    home, plant, error, is_live_ours, *pages = printed.splitlines()
    assert (home, plant, is_live_ours) == ('home', '{"name": "Fern"}', 'False')
    assert '40500' in error
    assert pages == 2 * ['/garden/docs text/html']
    assert (tmp_path / 'plants.jsonl').read_bytes() == encode(Plant(1, 'Fern'))


def test_host_may_have_modules_of_our_names(tmp_path):
    """A program app.py with a package store serves plants, and keeps its modules."""
    code = block(
        'docs/embedding.md', '## In a program that has modules of these names', 'python'
    )
    code = code.replace('/opt/plants', str(REPOSITORY))
    (tmp_path / 'store').mkdir()
    (tmp_path / 'store/__init__.py').write_text("WHOSE = 'the host'\n")
    (tmp_path / 'store/later.py').write_text('from store import WHOSE\n')
    (tmp_path / 'app.py').write_text(f'import store\n{code}\napplication = plants\n')
    (tmp_path / 'host.py').write_text('from app import application\n')
    use = """
    print(ask('/plants', **ADD))
    print(ask('/readyz'))
    import app, store.later
    print(app.store.WHOSE, store.later.WHOSE, app.__file__)
    """
    printed = python(ASK + textwrap.dedent(use), tmp_path, tmp_path)
    plant, ready, modules = printed.splitlines()
    assert (plant, ready) == ('{"name": "Fern"}', '{"status": "ready"}')
    assert modules == f'the host the host {tmp_path}/app.py'
    assert (tmp_path / 'plants.jsonl').read_bytes() == encode(Plant(1, 'Fern'))


ADD_IN_GREENLETS = """
import gevent
from store import Plant
adds = [gevent.spawn(store.add, Plant(n, 'Fern')) for n in range(20)]
print(sum(add.get() for add in gevent.joinall(adds)))
"""


@pytest.mark.parametrize(
    ('heading', 'more', 'printed'),
    [
        ('## Under your server', ADD_IN_GREENLETS, '20\n'),
        ('## In a program without HTTP', '', "['Fern']\n"),
    ],
)
def test_program_of_the_page_adds_plants(tmp_path, heading, more, printed):
    """A store is used without HTTP; with the scheduler of the page greenlets wait."""
    code = block('docs/embedding.md', heading, 'python')
    assert python(f'{code}\n{more}', tmp_path) == printed


def test_types_are_checked(tmp_path):
    """The command of the page finds our types, and nothing wrong but their use."""
    title = '## Types'
    [shown] = blocks(section('docs/embedding.md', title), 'console')
    command = shown.removeprefix('$ ').strip().replace('/opt/plants', str(REPOSITORY))
    command = command.replace(' mypy ', f' {sys.executable} -m mypy ')
    code = block('docs/embedding.md', title, 'python')
    (tmp_path / 'host.py').write_text(f'{code}wrong: int = plants\n')
    environment = dict(os.environ)
    if os.access(REPOSITORY, os.W_OK):  # then only the first run reads the libraries
        environment['MYPY_CACHE_DIR'] = str(REPOSITORY / '.mypy_cache/host')
    done = finished(['bash', '-c', command], cwd=tmp_path, env=environment)
    wrong, summary = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, '')
    assert re.match('host.py:[0-9]+: error: .* type "PlantsApp"', wrong)
    assert summary.startswith('Found 1 error in 1 file')


# ---- backup, restore, migration


BACKUP = blocks(section('docs/operating.md', '## Backup and restore'), 'bash')[0]
MANY = [Plant(id, 'Ivy') for id in range(3, 5001)]
DONE = (
    '(?:.*: the table is .*\n)?'
    'backups/plants-[0-9]+T[0-9]+Z.jsonl: 5000 plants verified, no damage\n'
)


@pytest.mark.parametrize('kind', ['A file', 'A database'])
def test_backup_is_restored(shell, tmp_path, database, kind):
    """What is restored holds the plants of the backup, and new ones can be added."""
    lost = url = f'jsonl:{tmp_path}/plants.jsonl'
    restored = '5000 plants verified, no damage\n'
    if kind == 'A database':
        lost, url = database.new_url(), database.new_url()
        copied = 'copied: 5000, already there: 0, conflicting: 0\n'
        restored = f'.*: the table is .*\n{copied}'
    with open_store(lost) as store:
        store.add_many([FERN, MOSS, *MANY])
        code, printed = shell(BACKUP.replace('jsonl:plants.jsonl', f"'{lost}'"))
        assert (code, bool(re.fullmatch(DONE, printed))) == (0, True), printed
        store.add(Plant(5001, 'Oak'))
    restore = block('docs/operating.md', f'### {kind}', 'bash')
    code, printed = shell(f'set -e\n{restore}', PLANTS_STORE=url)
    assert (code, bool(re.fullmatch(restored, printed))) == (0, True), printed
    with open_store(url, create='never') as store:
        assert sorted(store) == [FERN, MOSS, *MANY]
        assert store.add(Plant(5001, 'Yew'))


def test_service_moves_to_a_database(shell, tmp_path, url):
    """The steps of migrating.md end the old server and start one with the database."""
    script = block('docs/migrating.md', '# From a file to a database', 'bash')
    steps = script.replace('postgresql://plants@db.example/plants', f"'{url}'")
    assert steps != script
    path = {'PATH': f'{SCRIPTS}:{os.environ["PATH"]}'}
    command = ('gunicorn', '-p', 'pid')
    with Server(tmp_path, command=command, **path) as old:
        assert old.ask(request(body={'id': 3, 'name': 'Ivy'})).status == 200
        (tmp_path / 'new').mkdir()
        steps = f'cd {tmp_path}\n{steps}'
        with Server(tmp_path / 'new', command=('bash', '-c', steps), **path) as new:
            assert old.wait() == 0
            assert 'copied: 3, already there: 0, conflicting: 0' in new.log
            assert 'copied: 0, already there: 3, conflicting: 0' in new.log
            taken = new.ask(request(body={'id': 3, 'name': 'Yew'}))
            assert taken.json['error'] == 40006
            assert new.ask(request(body={'id': 4, 'name': 'Yew'})).status == 200
    with open_store(url) as store:
        assert sorted(store) == [FERN, MOSS, Plant(3, 'Ivy'), Plant(4, 'Yew')]


def test_each_row_about_an_attack_names_a_test():
    """Each attack and secret of SECURITY.md has a test that holds its limit."""
    code = ''.join(path.read_text() for path in REPOSITORY.glob('tests/*/*.py'))
    found = [cells for cells in rows(PAGES['SECURITY.md']) if len(cells) > 2]
    assert len(found) > 20
    for row in found:
        names = [name for name in quoted(row[-1]) if name.startswith('test_')]
        assert names, row
        assert [name for name in names if f'def {name}(' not in code] == []
