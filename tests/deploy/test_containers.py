"""The image and the composition in ``deploy/``, tested without a container engine."""

import json
import os
import re
import shlex
import shutil

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


def test_image_has_what_runs_and_listens_where_it_is_checked(checkout):
    """All files of the service are copied; PORT moves it and its health check."""
    copied = {name for item in instructions('COPY') for name in item.split()[:-1]}
    assert copied == {*ROOMS, 'requirements.txt', 'constraints.txt'}
    environment = variables(checkout / 'data')
    assert environment['PORT'] == PORT
    environment |= {'PORT': '9123', 'PLANTS_TOKENS': TOKEN}
    done = finished([*COMMAND, '--print-config'], cwd=checkout, env=environment)
    assert re.search(r"^bind +=\s+\['0\.0\.0\.0:9123'\]$", done.stdout, re.MULTILINE)


def composed(directory, **secrets):
    """Return the services of the composition with these secrets, or ``None``."""
    program = installed('docker-compose', 'docker-compose')
    shutil.copy(REPOSITORY / 'deploy/compose.yaml', directory)
    lines = [f'{name}={text}\n' for name, text in secrets.items()]
    (directory / '.env').write_text(''.join(lines))
    command = [program, '--file', directory / 'compose.yaml', 'config']
    done = finished(command, cwd='/', env={'PATH': os.environ['PATH']})
    return yaml.safe_load(done.stdout)['services'] if not done.returncode else None


def test_composition_needs_its_secrets_and_serves(checkout):
    """Without a secret nothing starts; nginx and the health check find the service."""
    secrets = {'PLANTS_TOKENS': TOKEN, 'DATABASE_PASSWORD': 'b' * 64}
    for name in secrets:
        assert composed(checkout, **{name: secrets[name]}) is None
    services = composed(checkout, **secrets)
    ours, nginx = services['plants'], services['nginx']
    service, database = ours['environment'], services['database']['environment']
    assert service['PLANTS_TOKENS'] == TOKEN
    assert not service['PLANTS_METRICS_TOKEN'], 'off'
    assert service['PGPASSWORD'] == database['POSTGRES_PASSWORD'] == 'b' * 64
    url = 'postgresql://{POSTGRES_USER}@database/{POSTGRES_DB}'
    assert service['PLANTS_STORE'] == url.format(**database)
    assert '/run/plants/plants.sock /run/plants.sock' in nginx['command']
    assert nginx['volumes'][0] in ours['volumes'], 'the directory of the socket'

    path = checkout / 'plants.sock'
    command = ours['command'].replace('/run/plants/plants.sock', str(path))
    command = shlex.split(command.replace(f':{PORT} ', ':0 '))
    environment = variables(checkout / 'data') | {'PORT': None}
    environment |= {'GUNICORN_CMD_ARGS': None, 'PLANTS_TOKENS': TOKEN}
    probe = json.loads(PROBE.partition('CMD ')[2])
    with Server(checkout, command=command, **environment) as server:
        with client_at(path) as client:
            assert client.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
        assert path.stat().st_mode & 0o002, 'nginx runs as another user'
        for port, code in ((server.port, 0), (1, 1)):
            where = {'PATH': environment['PATH'], 'PORT': str(port)}
            assert finished(probe, env=where).returncode == code
