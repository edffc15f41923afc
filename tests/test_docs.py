"""The README and docs/ list all settings, errors and commands; examples work."""

import ast
import os
import re
import subprocess
import sys
from functools import partial

import gunicorn.config
import pytest
import yaml
from conftest import Client
from postgresql import programs
from server import (
    PATIENCE,
    REPOSITORY,
    ROOMS,
    SCRIPTS,
    TOKEN,
    Server,
    installed,
    request,
    wait_until,
)

from app import create_app
from serving import worker
from store import Plant, open_store
from store.__main__ import _parser
from store.jsonl import lock
from store.jsonl.record import encode
from store.postgresql import limits
from store.postgresql.connection import REASONS
from web import openapi
from web.errors import ErrorValue
from web.settings import VARIABLES

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [*REPOSITORY.glob('*.md'), *REPOSITORY.glob('docs/*.md')]
}
DOCS = [name for name in PAGES if name.startswith('docs/')]
README = PAGES['README.md']
MAKEFILE = (REPOSITORY / 'Makefile').read_text()
RULES = REPOSITORY / 'deploy/prometheus/plants.rules.yml'
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


def test_readme_is_short():
    """The README can be read in ten minutes."""
    assert len(README.splitlines()) <= 130
    assert max(map(len, README.splitlines())) <= 100


@pytest.mark.parametrize('page', DOCS)
def test_page_is_linked_and_names_its_reader(page):
    """The README links to each page, and each page begins with whom it is for."""
    assert f'({page})' in README
    assert re.match(r'# .+\n\nFor ', PAGES[page])


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
    """Each variable that the service knows has a row, and each row is known."""
    listed = [
        quoted(cells[0])[0] for cells in rows(section('README.md', '## Settings'))
    ]
    assert listed == list(VARIABLES)


def test_error_values_are_listed():
    """Each value has a row with its status and meaning, and each row is a value."""
    listed = [cells for cells in rows(README) if cells[0].isdigit()]
    for (value, status, meaning), known in zip(listed, ErrorValue, strict=True):
        assert (int(value), int(status)) == (known, known.status)
        assert meaning.replace('`', '').startswith(known.meaning)


def test_paths_are_listed():
    """Each path that is described has a row, and each row is described."""
    listed = set(re.findall(r'^\| `([A-Z]+ /\S+)`', README, re.M))
    paths = openapi.describe(1, metrics=True)['paths']
    described = {
        f'{method.upper()} {path}'
        for path, methods in paths.items()
        for method in methods
    }
    assert listed == described


def test_make_targets_are_listed():
    """Each target has a row, and each one that a page names exists."""
    [phony] = re.findall('^[.]PHONY: (.*)$', MAKEFILE, re.M)
    table = section('docs/developing.md', '# Developing')
    listed = re.findall(r'`make ?([\w-]*)`', '\n'.join(row[0] for row in rows(table)))
    assert sorted(target or 'all' for target in listed) == sorted(phony.split())
    named = re.findall(r'(?:`|\$ |^)make ([a-z-]+)', '\n'.join(PAGES.values()), re.M)
    assert set(named) <= set(phony.split())


def test_modules_are_listed():
    """Each module has a row, and each row is a module."""
    rooms = ('serving', 'web', 'schemas', 'store')
    modules = {
        str(path.relative_to(REPOSITORY))
        for room in rooms
        for path in (REPOSITORY / room).rglob('*.py')
        if path.name not in ('__init__.py', '__main__.py')
    }
    table = rows(section('docs/developing.md', '## What is where'))
    listed = [quoted(cells[0])[0] for cells in table]
    assert {name for name in listed if name.endswith('.py')} - modules == {
        'app.py',
        'gunicorn.conf.py',
    }
    assert modules <= set(listed)
    for name in listed:
        assert (REPOSITORY / name).exists()


def test_commands_are_shown():
    """Each command of the store is shown, and the shown arguments are valid."""
    pages = '\n'.join(PAGES.values())
    shown = re.findall(r'(?<=python -m store )[a-z]+[^`|&>#\n]*', pages)
    parser = _parser({})
    commands = {vars(parser.parse_args(line.split()))['run'] for line in shown}
    names = {run.__name__[1:] for run in commands}
    assert names == set(re.findall(r'^    ([a-z]+) ', parser.format_help(), re.M))


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


def test_limits_are_stated():
    """The limits in the pages are those of the code."""
    settings = gunicorn.config.Config().settings
    lines = (REPOSITORY / 'gunicorn.conf.py').read_text()
    ours = {name: int(n) for name, n in re.findall(r'^(\w+) = ([\d_]+)$', lines, re.M)}
    for page, phrases in {
        'docs/api.md': [
            f'longer than {settings["limit_request_line"].get():,} bytes',
            f'longer than {settings["limit_request_field_size"].get():,} bytes',
            f'more than {settings["limit_request_fields"].get()} of them',
            f'longer than {worker.MAX_HEAD // 1024} KiB',
            f'to the end of its body | {worker.REQUEST_TIMEOUT} s',
            f'connection is kept | {ours["keepalive"]} s',
            f'connections of one worker | {ours["worker_connections"]:,};',
            f'reading for {worker.LINGER} seconds',
            f'than {worker.LINGER_RATE // 1024} KiB a second',
        ],
        'docs/stores.md': [
            f'longer than {lock.LOCK_WITHIN:.0f} seconds',
            f'has {limits.CONNECT_WITHIN} seconds to be made',
            f'a statement {limits.STATEMENT_WITHIN} seconds',
            f'locked waits {limits.LOCKED_WITHIN} seconds',
            f'at most {limits.MOST_CONNECTIONS} connections',
        ],
    }.items():
        text = ' '.join(PAGES[page].split())
        assert [phrase for phrase in phrases if phrase not in text] == []


# ---- log lines and reasons


def calls(*rooms):
    """Yield each call in the code of rooms, with the function that it is in."""
    for room in rooms:
        for path in (REPOSITORY / room).rglob('*.py'):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef):
                    for node in ast.walk(function):
                        if isinstance(node, ast.Call):
                            yield function, node


def name_of(node):
    """Return the last part of a dotted name."""
    return getattr(node, 'attr', getattr(node, 'id', ''))


def test_log_lines_are_listed():
    """Each warning and each error of the code has a row, and each row is one."""
    levels = {'exception': 'ERROR'}
    formats = {
        (levels.get(name_of(call.func), name_of(call.func).upper()), call.args[0].value)
        for _, call in calls('serving', 'web', 'store')
        if name_of(call.func) in ('warning', 'error', 'critical', 'exception')
        and name_of(getattr(call.func, 'value', None)) in ('log', 'logger')
    }
    table = rows(section('docs/operating.md', '### Log lines that ask for an action'))
    left = {(level, line.strip('`')) for level, line, _ in table}
    for level, text in formats:
        pattern = '[A-Z: ]+'.join(map(re.escape, re.split('%[ds]', text)))
        found = {
            row for row in left if row[0] == level and re.fullmatch(pattern, row[1])
        }
        assert found or text == '%s', text
        left -= found
    assert left == {
        ('CRITICAL', 'a sentence, and the server ends'),
        ('CRITICAL', 'WORKER TIMEOUT (pid:PID)'),
    }


def patterns(function, node):
    """Yield patterns for the text that an argument may be."""
    if isinstance(node, ast.Constant):
        yield re.escape(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield ''.join(
            re.escape(part.value) if isinstance(part, ast.Constant) else '.+'
            for part in node.values
        )
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from patterns(function, value)
    elif isinstance(node, ast.Name):
        for other in ast.walk(function):
            if isinstance(other, ast.Assign) and name_of(other.targets[0]) == node.id:
                yield from patterns(function, other.value)


def test_reasons_of_503_are_listed():
    """Each reason that a client may see has a row in the runbook."""
    found = set(map(re.escape, REASONS.values()))
    for function, call in calls('store/jsonl', 'store/postgresql', 'web'):
        if name_of(call.func) in ('StoreUnavailable', '_unavailable') and call.args:
            found.update(patterns(function, call.args[0]))
    found -= {re.escape('it was replaced meanwhile')}  # a command says it, not a server
    table = rows(
        section('docs/operating.md', '### 503: the store cannot take plants now')
    )
    listed = [reason for cells in table for reason in quoted(cells[0])]
    assert len(found) > 20
    for pattern in found:
        assert any(re.fullmatch(pattern, reason) for reason in listed), pattern


# ---- what can be run


@pytest.fixture
def shell(tmp_path):
    """A function that runs shell lines in a checkout with a plant file.

    It returns the exit code and the output.
    """
    for name in (*ROOMS, 'deploy'):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / '.venv').symlink_to(SCRIPTS.parent)
    (tmp_path / 'plants.jsonl').write_bytes(encode(FERN) + encode(MOSS))
    path = f'{SCRIPTS}:{programs()}:{os.environ["PATH"]}'

    def run(script, **variables):
        done = subprocess.run(
            ['bash', '-c', script],
            cwd=tmp_path,
            env={'PATH': path, 'HOME': str(tmp_path), 'WEB_CONCURRENCY': '2'}
            | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout.replace(str(tmp_path), '/srv')

    return run


def replay(shell, text):
    """Return what a terminal shows when the commands of a text are typed."""
    lines = []
    for command in re.findall(r'^\$ (.*(?:(?<=\\)\n.*)*)', text, re.M):
        lines += ["cat <<'COMMAND'", f'$ {command}', 'COMMAND', command]
    return shell('\n'.join(lines))[1]


@pytest.mark.parametrize(
    ('heading', 'damage'),
    [
        ('## Start, stop, reload', False),
        ('## Tokens', False),
        ('## The command line', False),
        ('### The plant file is damaged', True),
    ],
)
def test_commands_print_what_is_shown(shell, tmp_path, heading, damage):
    """The commands of operating.md print what the page shows."""
    if damage:
        lines = [encode(FERN), b'{"id":3\n', encode(MOSS)]
        (tmp_path / 'plants.jsonl').write_bytes(b''.join(lines))
    shown = block('docs/operating.md', heading, 'console')
    assert replay(shell, shown) == shown


@pytest.fixture(scope='module')
def service(tmp_path_factory):
    """The service, with two tokens."""
    directory = tmp_path_factory.mktemp('service')
    with Server(directory, workers=2, PLANTS_TOKENS=f'{TOKEN},other') as service:
        yield service


def test_first_request_is_answered_as_shown(service):
    """The command at the top of the README prints the answer below it."""
    curl = installed('curl', 'curl')
    command, shown = re.fullmatch(
        r'\$ curl (.*)\n(\{.*\})\n', blocks(README, 'console')[0], re.S
    ).groups()
    command = command.replace(':8000', f':{service.port}').replace('TOKEN', TOKEN)
    done = subprocess.run(f'{curl} --silent {command}', shell=True, capture_output=True)
    assert done.stdout.decode() == shown


def test_log_looks_as_shown(service):
    """The startup message and the line of a request look as operating.md shows them."""
    banner = re.escape(
        blocks(section('docs/operating.md', '## Start, stop, reload'))[0]
    )
    assert re.search(banner.replace('8000', r'\d+'), service.log)
    answer = service.ask(request(body={'id': 7, 'name': 'Fern', 'tag': 'shade'}))
    id = answer.headers['x-request-id']
    lines = wait_until(lambda: re.findall(f'.* {id} .*\n', service.log), 'it is logged')
    shape = partial(re.sub, '[0-9]+', '0')
    shown = blocks(section('docs/operating.md', '## Log'))[0]
    shown = shown.replace('05498126cae36805', id).replace(' shop ', ' token-1 ')
    assert shape(lines[0]) == shape(shown)


def test_readme_example_makes_an_application(tmp_path, monkeypatch):
    """The Python example of the README makes an application."""
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(blocks(README, 'python')[0], names)
    client = Client(names['application'], 'TOKEN')
    assert client.add({'id': 1, 'name': 'Fern'}).json == {'name': 'Fern'}


def test_tokens_file_example_is_accepted(tmp_path, serve, store):
    """The tokens file in operating.md accepts the token whose digest it has."""
    from web.tokens import TokensFile

    path = tmp_path / 'tokens'
    path.write_text(blocks(section('docs/operating.md', '## Tokens'))[0])
    client = Client(create_app(store, tokens=TokensFile(path)), 'garden-token')
    assert client.add({'id': 1, 'name': 'Fern'}).status_int == 200


# ---- the pages for embedders and authors


def python(code, directory, *path):
    """Run a program in a directory of its own; return what it prints."""
    search = ':'.join(map(str, [REPOSITORY, *path]))
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=directory,
        env={
            'PATH': os.environ['PATH'],
            'PYTHONPATH': search,
            'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1',
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, ''), done.stderr
    return done.stdout


USE_HOST = """
import io
import sys
from pathlib import Path
from wsgiref.util import setup_testing_defaults
from host import application

def ask(method, path, body=b''):
    environ = {
        'REQUEST_METHOD': method, 'PATH_INFO': path, 'CONTENT_LENGTH': str(len(body)),
        'CONTENT_TYPE': 'application/json', 'HTTP_AUTHORIZATION': 'Bearer TOKEN',
        'wsgi.input': io.BytesIO(body),
    }
    setup_testing_defaults(environ)
    answer = application(environ, lambda status, headers, exc_info=None: None)
    return b''.join(answer).decode()

print(ask('GET', '/'))
print(ask('POST', '/garden/plants', b'{"id": 1, "name": "Fern"}'))
print(ask('GET', '/garden/plants'))
print('status' in ask('GET', '/livez'))
top = Path(sys.modules['app'].__file__).parent
ours = {str(file) for file in [*top.glob('*.py'), *top.glob('*/__init__.py')]}
modules = sys.modules.items()
print(*sorted(name for name, m in modules if getattr(m, '__file__', None) in ours))
"""


@pytest.mark.parametrize('host', ['a WSGI program', 'Flask', 'Django'])
def test_host_serves_plants(tmp_path, host):
    """Each host serves its own page and plants, and no other module names are used."""
    code = block('docs/embedding.md', f'## In {host}', 'python')
    (tmp_path / 'host.py').write_text(code)
    printed = python(USE_HOST, tmp_path, tmp_path)
    home, plant, error, is_live_ours, names = printed.splitlines()
    assert (home, plant, is_live_ours) == ('home', '{"name": "Fern"}', 'False')
    assert '40500' in error
    taken = section('docs/embedding.md', '## What you need').partition(
        '**The names.**'
    )[2]
    assert names.split() == quoted(taken)[:4]
    assert (tmp_path / 'plants.jsonl').read_bytes() == encode(Plant(1, 'Fern'))


def test_store_waits_as_greenlets_do(tmp_path):
    """With the scheduler of the page, greenlets add plants at the same time."""
    code = block('docs/embedding.md', '## Under your server', 'python')
    use = (
        'import gevent; from store import Plant; '
        'adds = [gevent.spawn(store.add, Plant(n, "Fern")) for n in range(20)]; '
        'print(sum(add.get() for add in gevent.joinall(adds)))'
    )
    assert python(f'{code}\n{use}', tmp_path) == '20\n'


def test_store_is_used_without_http(tmp_path):
    """The program of the page stores a plant."""
    code = block('docs/embedding.md', '## In a program without HTTP', 'python')
    assert python(code, tmp_path) == "['Fern']\n"


def test_file_format_is_shown_as_written():
    """The lines that the page shows are what the store writes."""
    shown = block('docs/stores.md', '### The file format')
    assert shown.encode() == encode(FERN) + encode(MOSS)


# ---- backup, restore, migration


BACKUP = blocks(section('docs/operating.md', '## Backup and restore'), 'bash')[0]
MANY = [Plant(id, 'Ivy') for id in range(3, 5001)]
DONE = 'backups/plants-[0-9]+T[0-9]+Z.jsonl: 5000 plants verified, no damage\n'


def test_file_is_restored(shell, tmp_path):
    """A restored file holds the plants of the backup, and new ones can be added."""
    with open_store(f'jsonl:{tmp_path}/plants.jsonl') as store:
        store.add_many(MANY)
        code, printed = shell(BACKUP)
        assert code == 0
        assert re.fullmatch(DONE, printed)
        store.add(Plant(5001, 'Oak'))
    restore = block('docs/operating.md', '### A file', 'bash')
    assert shell(f'set -e\n{restore}') == (0, '5000 plants verified, no damage\n')
    with open_store(f'jsonl:{tmp_path}/plants.jsonl', create='never') as store:
        assert list(store) == [FERN, MOSS, *MANY]
        assert store.add(Plant(5001, 'Yew'))


def test_database_is_restored(shell, server):
    """A backup of a database fills a new one, and new plants can be added."""
    lost, url = server.new_url(), server.new_url()
    with open_store(lost) as store:
        store.add_many([FERN, MOSS, *MANY])
    code, printed = shell(BACKUP.replace('jsonl:plants.jsonl', f"'{lost}'"))
    assert code == 0
    assert re.fullmatch(DONE, printed)
    restore = block('docs/operating.md', '### A database', 'bash')
    copied = (0, 'copied: 5000, already there: 0, conflicting: 0\n')
    assert shell(restore, PLANTS_STORE=url) == copied
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
