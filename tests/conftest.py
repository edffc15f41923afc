"""What tests share: an application, the command line, a plant file, a database."""

import json
import logging
import os
import shutil
import sys
import tempfile
import warnings

import pytest

from app import create_app
from store.__main__ import main
from store.memory import MemoryStore

with warnings.catch_warnings():
    # WebOb imports cgi, which says by a warning that it will be removed.
    warnings.simplefilter('ignore', DeprecationWarning)
    from webtest import TestApp

pytest.register_assert_rewrite('errors')

# Fixtures with real servers.
pytest_plugins = ['exchange']

TOKEN = 'correct-horse.battery~staple'

# Files are in memory where there is room for them: the tests wait for thousands of
# syncs, and no sync shows whether it did anything before the power is cut.
MEMORY = '/dev/shm'
if (
    'TMPDIR' not in os.environ
    and os.path.isdir(MEMORY)
    and shutil.disk_usage(MEMORY).free > 2 * 2**30
):
    os.environ['TMPDIR'] = tempfile.tempdir = MEMORY


class Client(TestApp):
    """A client that takes any status for an answer.

    Args:
        app: The application.
        token: What to send as bearer token, if anything.
    """

    def __init__(self, app, token=None):
        super().__init__(app)
        self.authorization = ('Bearer', token) if token else None

    def do_request(self, req, status=None, expect_errors=None):
        return super().do_request(req, status, expect_errors=True)

    def send(self, body, path='/plants', content_type='application/json', **headers):
        """Post bytes; a header's name is written with underscores, None leaves it out.

        Args:
            body: Of the request.
            path: Where to.
            content_type: Of the body.
            headers: More headers, or others in place of the usual ones.
        """
        headers = {'content_type': content_type, **headers}
        return self.request(
            path,
            method='POST',
            body=body,
            headers={
                name.replace('_', '-'): text
                for name, text in headers.items()
                if text is not None
            },
        )

    def add(self, plant, **others):
        """Post a plant, or whatever it is, as JSON text; the others are ``send``'s."""
        return self.send(json.dumps(plant).encode(), **others)


@pytest.fixture
def store():
    """Return an empty store in memory."""
    return MemoryStore()


@pytest.fixture
def serve():
    """Return a function that serves a store to a client who has the token."""

    def serve(store, **options):
        options.setdefault('tokens', {'tester': TOKEN})
        return Client(create_app(store, **options), TOKEN)

    return serve


@pytest.fixture
def client(serve, store):
    """Return a client of the store who has the token."""
    return serve(store)


@pytest.fixture
def app(client):
    """Return the application that the client talks to."""
    return client.app


@pytest.fixture
def stranger(app):
    """Return a client of the same application who has no token."""
    return Client(app)


@pytest.fixture
def run(capfdbinary):
    """Return a function that runs a command of the store in this process.

    It returns the exit code, what was printed, and the lines of complaint.
    """

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ex:
            code = ex.code
        sys.stdout.flush()
        output, errors = capfdbinary.readouterr()
        return code, output, errors.decode().splitlines()

    return run


@pytest.fixture(scope='session')
def server():
    """A PostgreSQL server that each test leaves as it was: at work."""
    # Imported here, for those who need none.
    from postgresql import PostgreSQL

    with PostgreSQL() as server:
        yield server


@pytest.fixture
def url(server):
    """The URL of a store in PostgreSQL without plants."""
    return server.new_url()


@pytest.fixture
def path(tmp_path):
    """Where the plant file of a test is; it does not exist yet."""
    return tmp_path / 'plants.jsonl'


@pytest.fixture
def rebuilt(caplog):
    """Return a function that tells whether the log spoke of a new index since."""
    caplog.set_level(logging.INFO, logger='store')

    def rebuilt():
        spoke = 'building the index' in caplog.text
        caplog.clear()
        return spoke

    return rebuilt
