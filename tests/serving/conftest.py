"""A server with two workers that most tests share, and checkouts to serve from."""

import shutil

import pytest
from exchange import SECRET
from exchange import TAKEN
from server import REPOSITORY
from server import ROOMS
from server import TOKEN
from server import Server
from server import request


@pytest.fixture(scope='session')
def service(tmp_path_factory):
    """The service with two workers, whose log shows no token and no accident."""
    with Server(tmp_path_factory.mktemp('server'), workers=2) as server:
        assert server.ask(request(body=TAKEN)).status == 200
        yield server
    assert TOKEN not in server.log
    assert SECRET not in server.log
    assert 'Traceback' not in server.log


@pytest.fixture
def client(service):
    """A connection to the service."""
    with service.connect() as client:
        yield client


@pytest.fixture
def checkout(tmp_path):
    """A directory with what a checkout has, and no plants."""
    for name in ROOMS:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


@pytest.fixture
def copy(checkout):
    """A checkout whose files can be edited."""
    for link in list(checkout.iterdir()):
        original = link.resolve()
        link.unlink()
        if original.is_dir():
            shutil.copytree(original, link, ignore=shutil.ignore_patterns('*.pyc'))
        else:
            shutil.copy(original, link)
    return checkout
