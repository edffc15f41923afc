"""The image and the composition in ``deploy/``, tested without a container engine."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from installing import offline_pip, wheels
from server import REPOSITORY, ROOMS, RawClient, Server, installed, request, socket_to

RECIPE = (REPOSITORY / 'deploy/Containerfile').read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r'\\\n\s*', '', RECIPE).splitlines()
    if line and not line.startswith('#')
]


def instructions(name):
    """Return the arguments of all instructions of one kind, in order."""
    return [arguments for kind, arguments in INSTRUCTIONS if kind == name]


class Image:
    """A directory in which the Containerfile is carried out, instead of an image.

    Args:
        root: The directory that stands for the root of the file system.
    """

    def __init__(self, root):
        self._scripts = root / 'usr/local/bin'
        subprocess.run([sys.executable, '-m', 'venv', root / 'usr/local'], check=True)
        self.variables = dict(item.split('=', 1) for item in instructions('ENV'))
        self.plants = root / 'data/plants.jsonl'
        self.plants.parent.mkdir()
        self.variables['PLANTS_STORE'] = f'jsonl:{self.plants}'
        self.variables['PATH'] = f'{self._scripts}:{os.defpath}'
        self.directory = root
        for kind, arguments in INSTRUCTIONS:
            if kind == 'WORKDIR':
                self.directory = root / arguments.strip('/')
                self.directory.mkdir(parents=True)
            elif kind == 'COPY':
                self._copy(*arguments.split())
            elif kind == 'RUN' and arguments.startswith('pip '):
                self.run(shlex.split(arguments), **offline_pip()).check_returncode()

    def run(self, command, **variables):
        """Run a command as in a container of the image."""
        return subprocess.run(
            ['env', *command],
            cwd=self.directory,
            env=self.variables | variables,
            capture_output=True,
            text=True,
        )

    def server(self, command, **variables):
        """Return a server as in a container of the image, on a loopback port."""
        return Server(
            self.directory,
            command=['env', *command],
            **{'GUNICORN_CMD_ARGS': None, **self.variables, **variables},
        )

    def health(self, port):
        """Run the health check for a port; return its exit code: 0 is healthy."""
        [check] = instructions('HEALTHCHECK')
        return self.run(
            json.loads(check.partition('CMD ')[2]), PORT=str(port)
        ).returncode

    def _copy(self, *paths):
        *sources, target = paths
        for source in sources:
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, self.directory / target)
            else:
                shutil.copy(REPOSITORY / source, self.directory / target)


@pytest.fixture(scope='module')
def image(tmp_path_factory):
    """The image that the Containerfile describes."""
    wheels()  # without wheels, skip before a venv is made
    return Image(tmp_path_factory.mktemp('image'))


# ---- the image


def test_image_serves(image):
    """The files of the image are enough to serve, to be healthy, and to stop."""
    [command] = map(json.loads, instructions('CMD'))
    with image.server([*command, '--bind', '127.0.0.1:0'], PORT=None) as server:
        assert server.ask(request(body={'id': 1, 'name': 'Fern'})).status == 200
        assert image.plants.read_bytes().count(b'\n') == 1
        assert image.health(server.port) == 0
        assert image.health(1) != 0
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_image_listens_where_its_health_is_checked(image):
    """The variable PORT moves the service and its health check together."""
    [command] = map(json.loads, instructions('CMD'))
    done = image.run([*command, '--print-config'], PORT='9123', PLANTS_TOKENS='t')
    assert done.returncode == 0, done.stderr
    assert re.search(r"^bind +=\s+\['0\.0\.0\.0:9123'\]$", done.stdout, re.MULTILINE)
    assert instructions('EXPOSE') == [image.variables['PORT']]


def test_image_has_only_what_runs():
    """All files that the service needs are copied, and no others."""
    copied = {name for item in instructions('COPY') for name in item.split()[:-1]}
    assert copied == {*ROOMS, 'requirements.txt', 'constraints.txt'}


def test_image_runs_as_a_user_that_owns_its_volume():
    """The ids are fixed, neither is root's, and the volume belongs to them."""
    [user] = instructions('USER')
    uid, gid = map(int, user.split(':'))
    assert uid > 0
    assert gid > 0
    [made] = [item for item in instructions('RUN') if 'useradd' in item]
    assert f'groupadd --gid {gid} plants' in made
    assert f'useradd --uid {uid} --gid {gid} ' in made
    assert instructions('VOLUME') == ['/data']
    assert 'install -d -o plants -g plants -m 700 /data' in made


# ---- the composition


SECRETS = {'PLANTS_TOKENS': 'garden-token', 'DATABASE_PASSWORD': 'pass@word/?'}


def compose(**variables):
    """Run docker-compose config, which prints the resolved composition."""
    return subprocess.run(
        [
            *(installed('docker-compose', 'docker-compose'), '--file'),
            *(REPOSITORY / 'deploy/compose.yaml', 'config'),
        ],
        env={'PATH': os.environ['PATH'], **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope='module')
def services():
    """The services of the composition, with the variables of deploy/.env."""
    done = compose(**SECRETS)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)['services']


@pytest.mark.parametrize('missing', SECRETS)
def test_composition_needs_its_secrets(missing):
    """Without a token or a password nothing starts, and the message names the file."""
    others = {name: value for name, value in SECRETS.items() if name != missing}
    done = compose(**others)
    assert done.returncode != 0
    assert 'set it in deploy/.env' in done.stderr


def test_composition_serves(services, image, url, tmp_path):
    """The service listens on the socket for nginx, and stores into the database."""
    service = services['plants']
    assert service['environment']['PLANTS_STORE'].endswith('@database/plants')
    path = tmp_path / 'plants.sock'
    command = service['command'].replace('/run/plants/plants.sock', str(path))
    command = command.replace(':8000', ':0')
    variables = service['environment'] | {'PLANTS_STORE': url}
    data = request(body={'id': 1, 'name': 'Fern'}, authorization='Bearer garden-token')
    with image.server(shlex.split(command), PORT=None, **variables) as server:
        with RawClient(over=socket_to(path)) as client:
            assert client.ask(data).status == 200
        assert path.stat().st_mode & 0o002, 'nginx runs as another user'
        assert image.health(server.port) == 0
    listed = image.run(['python', '-m', 'store', 'list', url])
    assert json.loads(listed.stdout) == {'id': 1, 'name': 'Fern'}


def test_composition_is_checked_at_the_port_of_the_service(services, image):
    """The health check of the image asks the port at which the service listens."""
    assert f':{image.variables["PORT"]} ' in services['plants']['command']
    assert 'healthcheck' not in services['plants']
    assert services['nginx']['depends_on']['plants']['condition'] == 'service_healthy'


def test_composition_agrees_on_the_database(services):
    """Service and database have the same name, user and password."""
    database = services['database']['environment']
    variables = services['plants']['environment']
    assert variables['PLANTS_STORE'] == 'postgresql://{}@database/{}'.format(
        database['POSTGRES_USER'], database['POSTGRES_DB']
    )
    assert variables['PGPASSWORD'] == database['POSTGRES_PASSWORD'] == 'pass@word/?'


def test_composition_leads_nginx_to_its_files(services):
    """Each file that nginx.conf names is mounted, or a link to a mounted one."""
    recipe = (REPOSITORY / 'deploy/nginx.conf').read_text()
    nginx = services['nginx']
    mounted = dict(x.removesuffix(':ro').split(':')[::-1] for x in nginx['volumes'][1:])
    assert mounted.pop('/etc/nginx/conf.d/plants.conf').endswith('/deploy/nginx.conf')
    links = dict(re.findall(r'ln -sf (\S+) (\S+)', nginx['command']))
    assert f'--bind unix:{next(iter(links))}' in services['plants']['command']
    assert nginx['volumes'][0] in services['plants']['volumes']
    for path in (*mounted, *links.values()):
        assert re.search(rf'[ :]{path}[ ;]', recipe), path


def test_composition_gives_the_service_time_to_stop(services):
    """The engine waits longer for a stop than the workers may take."""
    code = (REPOSITORY / 'gunicorn.conf.py').read_text()
    [seconds] = re.findall(r'^graceful_timeout = (\d+)$', code, re.MULTILINE)
    assert services['plants']['stop_grace_period'] == '40s'
    assert int(seconds) < 40
