"""The image and the composition in ``deploy/``, tested without a container engine."""

import json
import os
import re
import shlex
import shutil

import pytest
import yaml
from machine import client_at
from server import (
    REPOSITORY,
    ROOMS,
    SCRIPTS,
    TOKEN,
    Server,
    finished,
    installed,
    request,
)

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


def test_image_has_what_runs_and_listens_where_it_is_checked(checkout):
    """All files of the service are copied; PORT moves it and its health check."""
    copied = {name for item in instructions('COPY') for name in item.split()[:-1]}
    assert copied == {*ROOMS, 'requirements.txt', 'constraints.txt'}
    environment = variables(checkout / 'data')
    assert environment['PORT'] == PORT
    environment |= {'PORT': '9123', 'PLANTS_TOKENS': TOKEN}
    done = finished([*COMMAND, '--print-config'], cwd=checkout, env=environment)
    assert re.search(r"^bind +=\s+\['0\.0\.0\.0:9123'\]$", done.stdout, re.MULTILINE)


@pytest.fixture
def compose(tmp_path):
    """Return a function that resolves the composition with these secrets."""
    shutil.copy(REPOSITORY / 'deploy/compose.yaml', tmp_path)
    program = installed('docker-compose', 'docker-compose')

    def compose(**secrets):
        lines = [f'{name}={text}\n' for name, text in secrets.items()]
        (tmp_path / '.env').write_text(''.join(lines))
        command = [program, '--file', tmp_path / 'compose.yaml', 'config']
        done = finished(command, cwd='/', env={'PATH': os.environ['PATH']})
        return yaml.safe_load(done.stdout)['services'] if not done.returncode else None

    return compose


def test_composition_needs_its_secrets_and_passes_them_on(compose):
    """Without a token or a password nothing starts; each reader gets them unchanged."""
    secrets = {'PLANTS_TOKENS': 'a' * 64, 'DATABASE_PASSWORD': 'b' * 64}
    for name in secrets:
        assert compose(**{name: secrets[name]}) is None
    services = compose(**secrets)
    service = services['plants']['environment']
    database = services['database']['environment']
    assert service['PLANTS_TOKENS'] == 'a' * 64
    assert not service['PLANTS_METRICS_TOKEN'], 'off'
    assert service['PGPASSWORD'] == database['POSTGRES_PASSWORD'] == 'b' * 64
    url = 'postgresql://{POSTGRES_USER}@database/{POSTGRES_DB}'
    assert service['PLANTS_STORE'] == url.format(**database)


def test_composition_serves(compose, checkout):
    """The service listens on the socket for nginx, and on the port of its check."""
    services = compose(PLANTS_TOKENS=TOKEN, DATABASE_PASSWORD='b')
    ours, nginx = services['plants'], services['nginx']
    assert '/run/plants/plants.sock /run/plants.sock' in nginx['command']
    assert nginx['volumes'][0] in ours['volumes'], 'the directory of the socket'
    path = checkout / 'plants.sock'
    command = ours['command'].replace('/run/plants/plants.sock', str(path))
    assert f':{PORT} ' in command
    environment = variables(checkout / 'data') | {'PORT': None}
    environment |= {'GUNICORN_CMD_ARGS': None, 'PLANTS_TOKENS': TOKEN}
    command = shlex.split(command.replace(f':{PORT}', ':0'))
    with Server(checkout, command=command, **environment) as server:
        with client_at(path) as client:
            assert client.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
        assert path.stat().st_mode & 0o002, 'nginx runs as another user'
        assert health(server.port) == 0
        assert health(1) != 0
