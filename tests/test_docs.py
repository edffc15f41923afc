"""What the pages show works: code runs, links hold, lists are complete.

``python`` blocks run as programs, ``console`` blocks print what the page shows, and
``bash`` blocks are steps that a test takes. Blocks in other languages are not run here.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import distribution

import pytest
from exchange import fern
from packaging.requirements import Requirement
from postgresql import programs
from proxy import Proxy
from rawclient import TOKEN, request
from server import REPOSITORY, ROOMS, SCRIPTS, Server, finished, installed
from waiting import wait_until

from store import Plant, open_store
from store.jsonl.record import encode
from web.errors import ErrorValue
from web.settings import VARIABLES

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [*REPOSITORY.glob('*.md'), *REPOSITORY.glob('docs/*.md')]
}
FERN, MOSS, OAK = Plant(1, 'Fern', 'shade'), Plant(2, 'Moss'), Plant(3, 'Oak')


def blocks(language, *pages):
    """Return the blocks of a language as parameters, each with its page and line."""
    fence = re.compile(rf'^```{language}\n(.*?)^```$', re.M | re.S)
    return [
        pytest.param(found[1], id=f'{page}:{text[: found.start()].count(chr(10)) + 1}')
        for page, text in PAGES.items()
        if page in pages or not pages
        for found in fence.finditer(text)
    ]


@pytest.mark.parametrize('page', PAGES)
def test_links_have_targets(page):
    """Each link is to a file that exists, and to a heading in it if it names one."""
    for link in re.findall(r'\]\((?!https://)([^)]+)\)', PAGES[page]):
        name, _, anchor = link.partition('#')
        target = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert target.exists(), link
        if anchor:
            text = re.sub(r'^```.*?^```$', '', target.read_text(), flags=re.M | re.S)
            titles = re.findall('^#+ (.*)$', text.lower(), re.M)
            anchors = [re.sub(r'[^\w -]', '', t).replace(' ', '-') for t in titles]
            assert anchor in anchors, link


def test_settings_and_error_values_are_listed():
    """Each has a row, an error value with its status, and nothing else has one."""
    listed = re.findall(r'^\| `(PLANTS_\w+)` \|', PAGES['README.md'], re.M)
    assert sorted(listed) == sorted(VARIABLES)
    listed = re.findall(r'^\| (\d{5}) \| (\d{3}) \|', PAGES['README.md'], re.M)
    assert listed == [(str(value.value), str(value // 100)) for value in ErrorValue]


# Appended to a program that serves: WebTest checks its answers as WSGI.
ADD = """
from webtest import TestApp

headers = {'Authorization': 'Bearer TOKEN', 'Content-Type': 'application/json'}
client = TestApp(application)
print(client.post('PREFIX/plants', b'{"id": 1, "name": "Fern"}', headers).text)
if 'PREFIX':
    print(client.get('/').text)
"""


@pytest.mark.parametrize('code', blocks('python'))
def test_program_runs(tmp_path, code):
    """A program of a page runs; one that serves adds a plant, and has its own page."""
    code = code.replace('/opt/plants', str(REPOSITORY))
    prefix = '/garden' if '/garden' in code else ''
    serves = 'application' in code
    code += serves * ADD.replace('PREFIX', prefix)
    environment = {'PATH': os.environ['PATH'], 'PYTHONPATH': str(REPOSITORY)}
    (tmp_path / 'plants.jsonl').touch()  # a new one is told
    given = {'cwd': tmp_path, 'env': environment, 'input': '{"id":1,"name":"\x85"}\n\n'}
    done = finished([sys.executable, '-c', code], **given)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'stdin' not in code or done.stdout == '{"id": 1, "name": "\\u0085"}\n'
    if serves:
        assert done.stdout == '{"name": "Fern"}\n' + ('home\n' if prefix else '')
        assert (tmp_path / 'plants.jsonl').read_bytes() == encode(Plant(1, 'Fern'))


def test_listed_packages_suffice(tmp_path):
    """An embedded service needs the packages that its page lists, and no others."""
    page, program = 'docs/embedding.md', 'import sys; sys.path[:0] = sys.argv[1:]\n'
    [listed] = re.findall(r'\*\*The packages\.\*\* (.*), in the versions', PAGES[page])
    needed = re.findall('`(.+?)`', listed)
    for name in needed:  # it grows by what they need in turn
        wanted = map(Requirement, distribution(name).requires or ())
        needed += [it.name for it in wanted if not it.marker or it.marker.evaluate()]
        for top in {file.parts[0] for file in distribution(name).files} - {'..'}:
            with suppress(FileExistsError):
                (tmp_path / top).symlink_to(distribution(name).locate_file(top))
    program += blocks('python', page)[0].values[0] + 'store.ping()'
    (tmp_path / 'plants.jsonl').touch()  # a new one is told
    command = [sys.executable, '-ISc', program, tmp_path, REPOSITORY]
    done = finished(command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')


@pytest.fixture
def shell(tmp_path):
    """A function that runs a script in a checkout; it returns exit code and output."""
    for name in (*ROOMS, 'deploy'):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / '.venv').symlink_to(SCRIPTS.parent)
    (tmp_path / 'plants.jsonl').write_bytes(encode(FERN) + encode(MOSS))
    ours = {'PATH': f'{SCRIPTS}:{programs()}:{os.environ["PATH"]}'}
    ours |= {'HOME': str(tmp_path), 'WEB_CONCURRENCY': '2'}

    def run(script, **variables):
        how = {'cwd': tmp_path, 'env': ours | variables, 'stderr': subprocess.STDOUT}
        done = finished(['bash', '-c', script], **how)
        return done.returncode, done.stdout.replace(str(tmp_path), '/srv')

    return run


@pytest.mark.parametrize('shown', blocks('console', 'docs/operating.md'))
def test_commands_print_what_is_shown(shell, tmp_path, shown):
    """Commands print what the page shows below them."""
    if 'damaged' in shown:
        lines = [encode(FERN), b'{"id":3\n', encode(MOSS)]
        (tmp_path / 'plants.jsonl').write_bytes(b''.join(lines))
    lines = []
    for command in re.findall(r'^\$ (.*(?:(?<=\\)\n.*)*)', shown, re.M):
        lines += ["cat <<'COMMAND'", f'$ {command}', 'COMMAND', command]
    # What a terminal shows when the commands are typed.
    assert shell('\n'.join(lines))[1] == shown


def test_first_request_is_answered_as_shown(tmp_path):
    """The command at the top of the README prints the answer below it."""
    curl = installed('curl', 'curl')
    example = r'(?ms)^\$ curl (.*?\n)(\{.*\}\n)'
    command, answer = re.search(example, PAGES['README.md']).groups()
    with Server(tmp_path) as server:
        command = command.replace(':8000', f':{server.port}').replace('TOKEN', TOKEN)
        nowhere = {'http_proxy': 'http://127.0.0.1:9'}
        done = finished(f'{curl} --silent {command}', shell=True, env=nowhere)
    assert done.stdout.strip() == answer.strip()


@pytest.mark.parametrize('kind', ['file', 'database'])
def test_backup_is_restored(shell, tmp_path, database, kind):
    """What is restored holds the plants of the backup, and new ones can be added."""
    backup, *restores = [each.values[0] for each in blocks('bash', 'docs/operating.md')]
    lost = url = f'jsonl:{tmp_path}/plants.jsonl'
    if kind == 'database':
        lost, url = database.new_url(), database.new_url()
    with open_store(lost) as store:
        store.add_many([FERN, MOSS])
        code, printed = shell(backup.replace('jsonl:plants.jsonl', f"'{lost}'"))
        assert code == 0, printed
        store.add(OAK)
    restore = restores[kind == 'database']
    code, printed = shell(f'set -e\n{restore}', PLANTS_STORE=url)
    assert code == 0, printed
    with open_store(url, create=False) as store:
        assert sorted(store) == [FERN, MOSS]
        assert store.add(OAK._replace(name='Yew'))


def test_container_is_backed_up_and_restored(shell, tmp_path):
    """By the commands that run in it: the server goes on with the restored file."""
    [script] = [each.values[0] for each in blocks('sh', 'docs/operating.md')]
    script = script.replace('podman exec -i plants ', '').replace('/data', '.')
    before = encode(FERN) + encode(MOSS)
    with Server(tmp_path) as server:
        script = script.replace('-HUP 1', f'-HUP {server.pid}')
        code, printed = shell(f'set -eu\n{script}')
        assert code == 0, printed
        add = request(body=encode(OAK))
        wait_until(lambda: server.ask(add).status == 200, 'it reloads')
    assert (tmp_path / 'before-restore.jsonl').read_bytes() == before
    assert (tmp_path / 'plants.jsonl').read_bytes() == before + encode(OAK)


def test_service_moves_to_a_database(shell, tmp_path, url):
    """The steps end the old server and start one with the database."""
    [script] = [each.values[0] for each in blocks('bash', 'docs/stores.md')]
    steps = script.replace('postgresql://plants@db.example/plants', f"'{url}'")
    assert steps != script
    path = {'PATH': f'{SCRIPTS}:{os.environ["PATH"]}'}
    with Server(tmp_path, '-p', 'pid') as old:
        assert old.ask(request(body=encode(OAK))).status == 200
        (tmp_path / 'new').mkdir()
        steps = f'cd {tmp_path}\n{steps}'
        with Server(tmp_path / 'new', command=('bash', '-c', steps), **path) as new:
            assert old.wait() == 0
            taken = new.ask(request(body={'id': 3, 'name': 'Yew'}))
            assert taken.json['error'] == 40006
            assert new.ask(request(body={'id': 4, 'name': 'Yew'})).status == 200
    with open_store(url) as store:
        assert sorted(store) == [FERN, MOSS, OAK, Plant(4, 'Yew')]


# By the language of its block: what runs a client, and what calls it.
CLIENTS = {
    'py': (sys.executable, '-c', 'print(json.dumps(add_plant(*{})))'),
    'js': ('node', '-e', 'addPlant(...{}).then(JSON.stringify).then(console.log)'),
}


@pytest.mark.parametrize('language', CLIENTS)
def test_client_repeats_what_was_lost_and_no_refusal(language, service):
    """The plant is stored once, and the answer to the repeat is the first one's."""
    program, option, call = CLIENTS[language]
    [code] = blocks(language, 'docs/api.md')
    plant = fern(tag=language)
    with Proxy(service.port) as proxy:
        proxy.cut(after=0)
        for body, said in (plant, '"name": *"Fern"'), (plant | {'name': 'Moss'}, '400'):
            url = f'http://127.0.0.1:{proxy.port}/plants'
            called = code.values[0] + call.format(json.dumps([body, url, TOKEN]))
            done = finished([installed(program, 'nodejs'), option, called])
            assert re.search(said, done.stdout + done.stderr)
    assert service.plants().count(plant) == 1
