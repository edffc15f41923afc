"""The image and the composition in ``deploy/``, tested without a container engine."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from machine import client_at
from server import REPOSITORY, ROOMS, SCRIPTS, Server, finished, installed, request

CONTAINERFILE = (REPOSITORY / 'deploy/Containerfile').read_text().replace('\\\n', '')


def instructions(name):
    """Return the arguments of all instructions of one kind, in order."""
    return re.findall(rf'^{name} +(.*)$', CONTAINERFILE, re.MULTILINE)


[COMMAND] = map(json.loads, instructions('CMD'))
[PORT] = instructions('EXPOSE')
[PROBE] = instructions('HEALTHCHECK')


def variables(directory):
    """Return the environment of a container whose volume is a directory; make that."""
    directory.mkdir(exist_ok=True)
    ours = dict(item.split('=', 1) for item in instructions('ENV'))
    ours['PLANTS_STORE'] = ours['PLANTS_STORE'].replace('/data', str(directory))
    return ours | {'PATH': f'{SCRIPTS}:{os.defpath}'}


def health(port):
    """Run the health check for a port; return its exit code: 0 is healthy."""
    check = json.loads(PROBE.partition('CMD ')[2])
    path = f'{SCRIPTS}:{os.defpath}'
    return finished(check, env={'PATH': path, 'PORT': str(port)}).returncode


def test_image_listens_where_its_health_is_checked(checkout):
    """The variable PORT moves the service and its health check together."""
    assert variables(checkout)['PORT'] == PORT
    assert '{os.environ[\\"PORT\\"]}/readyz' in PROBE
    environment = variables(checkout / 'data') | {'PORT': '9123', 'PLANTS_TOKENS': 't'}
    done = finished([*COMMAND, '--print-config'], cwd=checkout, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^bind +=\s+\['0\.0\.0\.0:9123'\]$", done.stdout, re.MULTILINE)


def test_image_has_only_what_runs():
    """All files that the service needs are copied, and no others."""
    copied = {name for item in instructions('COPY') for name in item.split()[:-1]}
    assert copied == {*ROOMS, 'requirements.txt', 'constraints.txt'}
    [pip] = [item for item in instructions('RUN') if item.startswith('pip ')]
    assert pip.endswith('--only-binary :all: -r requirements.txt')


@pytest.fixture(scope='module')
def secrets(tmp_path_factory):
    """The directory with the secrets that the command in docs/deploying.md makes."""
    installed('openssl', 'openssl')
    directory = tmp_path_factory.mktemp('composition')
    page = (REPOSITORY / 'docs/deploying.md').read_text()
    [script] = re.findall(r'^\$ (umask .*(?:\n> .*)*)', page, re.MULTILINE)
    (directory / 'deploy').mkdir()
    script = script.replace('\n> ', '\n')
    subprocess.run(['sh', '-ec', script], cwd=directory, check=True)
    return directory / 'deploy/.env'


def compose(secrets):
    """Run docker-compose config, which prints the resolved composition."""
    shutil.copy(REPOSITORY / 'deploy/compose.yaml', secrets.parent)
    program = installed('docker-compose', 'docker-compose')
    command = [program, '--file', secrets.with_name('compose.yaml'), 'config']
    return finished(command, cwd='/', env={'PATH': os.environ['PATH']})


@pytest.fixture(scope='module')
def services(secrets):
    """The services of the composition."""
    done = compose(secrets)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)['services']


@pytest.mark.parametrize('missing', ['PLANTS_TOKENS', 'DATABASE_PASSWORD'])
def test_composition_needs_its_secrets(missing, secrets, tmp_path):
    """Without a token or a password nothing starts, and the message names the file."""
    lines = secrets.read_text().splitlines(keepends=True)
    others = [line for line in lines if not line.startswith(f'{missing}=')]
    assert len(others) == 1
    (tmp_path / '.env').write_text(''.join(others))
    done = compose(tmp_path / '.env')
    assert done.returncode != 0
    assert 'set it in deploy/.env' in done.stderr


def test_composition_gets_the_secrets_as_they_are(services, secrets):
    """Nobody else reads the secrets; service and database get them unchanged."""
    assert secrets.stat().st_mode & 0o077 == 0
    made = dict(line.split('=') for line in secrets.read_text().splitlines())
    assert {len(value) for value in made.values()} == {64}
    service = services['plants']['environment']
    database = services['database']['environment']
    assert service['PLANTS_TOKENS'] == made['PLANTS_TOKENS']
    assert service['PGPASSWORD'] == made['DATABASE_PASSWORD']
    assert database['POSTGRES_PASSWORD'] == made['DATABASE_PASSWORD']
    url = 'postgresql://{POSTGRES_USER}@database/{POSTGRES_DB}'
    assert service['PLANTS_STORE'] == url.format(**database)


def test_composition_is_confined(services):
    """No container gains privileges, or processes without limit; ours has none."""
    for service in services.values():
        assert service['security_opt'] == ['no-new-privileges:true']
        assert service['pids_limit'] <= 1000
    ours = services['plants']
    assert (ours['cap_drop'], ours['read_only']) == (['ALL'], True)
    assert ours['ulimits'] == {'core': 0}
    assert not {'cap_add', 'privileged', 'devices', 'network_mode'} & ours.keys()


def test_composition_serves(services, checkout):
    """The service listens on the socket for nginx, and on the port of its check."""
    service = services['plants']
    path = checkout / 'plants.sock'
    command = service['command'].replace('/run/plants/plants.sock', str(path))
    assert f':{PORT} ' in command
    assert 'healthcheck' not in service
    ours = variables(checkout / 'data') | {'PORT': None, 'GUNICORN_CMD_ARGS': None}
    command = shlex.split(command.replace(f':{PORT}', ':0'))
    with Server(checkout, command=command, **ours) as server:
        with client_at(path) as client:
            assert client.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
        assert path.stat().st_mode & 0o002, 'nginx runs as another user'
        assert health(server.port) == 0
        assert health(1) != 0


def test_composition_leads_nginx_to_its_files(services):
    """Each file that nginx.conf names is mounted, or a link to a mounted one."""
    recipe = (REPOSITORY / 'deploy/nginx.conf').read_text()
    nginx = services['nginx']
    mounted = dict(x.removesuffix(':ro').split(':')[::-1] for x in nginx['volumes'][1:])
    assert mounted.pop('/etc/nginx/conf.d/plants.conf').endswith('/nginx.conf')
    links = dict(re.findall(r'ln -sf (\S+) (\S+)', nginx['command']))
    assert f'--bind unix:{next(iter(links))}' in services['plants']['command']
    assert nginx['volumes'][0] in services['plants']['volumes']
    assert nginx['depends_on']['plants']['condition'] == 'service_healthy'
    for path in (*mounted, *links.values()):
        assert re.search(rf'[ :]{path}[ ;]', recipe), path
