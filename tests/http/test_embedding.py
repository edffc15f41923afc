"""The application under other WSGI servers, and below the path of another one."""

import threading
from contextlib import contextmanager, suppress
from wsgiref.validate import validator

import pytest
import waitress.server
import waitress.wasyncore
from conftest import Client
from exchange import assert_error, chunked
from rawclient import TOKEN, RawClient, request
from server import PATIENCE
from test_contract import FERN, FERN_ANSWER

from store import Plant

MAX_BODY = 200  # bytes; small, so that a larger body still goes out in one piece
JSON = 'application/json'


@contextmanager
def served_by_waitress(app):
    """Yield the port where waitress serves an application."""
    sockets = {}
    server = waitress.server.create_server(app, map=sockets, host='127.0.0.1', port=0)

    def stop():
        # In the server's thread: closing a descriptor that it polls would be an error.
        with suppress(OSError):  # it has closed the trigger already
            server.trigger.pull_trigger(lambda: waitress.wasyncore.close_all(sockets))

    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.effective_port
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        server.task_dispatcher.shutdown()


def test_another_server_serves_the_application(serve, store):
    """Each kind of answer reaches the client; the WSGI validator finds no fault."""

    def ask(data):
        with RawClient(port) as client:
            return client.ask(data)

    app = serve(store, max_body_bytes=MAX_BODY).app
    with served_by_waitress(validator(app)) as port:
        assert_error(ask(request()), 40001)
        assert_error(ask(request(body=b' ' * (MAX_BODY + 1))), 40003)
        assert_error(ask(request('OPTIONS', '/livez', authorization=None)), 40500)
        assert ask(request(body=FERN)).json == FERN_ANSWER
    with served_by_waitress(
        app
    ) as port:  # the validator hides that the server ends the input
        answer = ask(chunked(b'{"id": 2, "name": ', b'"Moss"}', content_type=JSON))
    assert answer.json == {'name': 'Moss'}
    assert list(store) == [Plant(**FERN), Plant(2, 'Moss')]


@pytest.fixture
def mounted(app):
    """A function: a client of the application, with variables set, or None removed."""

    def mounted(**variables):
        def changed(environ, start_response):
            environ |= variables
            kept = {name: text for name, text in environ.items() if text is not None}
            return app(kept, start_response)

        return Client(changed, TOKEN)

    return mounted


@pytest.mark.parametrize('prefix', ['', '/garden', '/my/garden', '/plants'])
def test_paths_are_those_below_the_prefix(mounted, prefix):
    """Under any prefix each path works as without one, and so does every refusal."""
    client = mounted(SCRIPT_NAME=prefix)
    assert client.add(FERN).json == FERN_ANSWER
    assert client.get('/livez', headers={'Authorization': ''}).status_int == 200
    assert client.get('/openapi.json').json['servers'][0]['url'] == '.'
    assert_error(client.get('/plants', headers={'Authorization': ''}), 40100)
    assert_error(client.get('/plants/plants'), 40400)
    assert_error(client.get('/plants'), 40500)


VARIABLES = {
    'PATH_INFO': 40400,
    'CONTENT_LENGTH': 40001,
    'CONTENT_TYPE': 40002,
    'HTTP_AUTHORIZATION': 40100,
}


@pytest.mark.parametrize('nothing', ['', None], ids=['empty', 'absent'])
def test_empty_variable_is_like_an_absent_one(mounted, nothing):
    """An empty variable of the environ and an absent one mean the same."""
    for variable, value in VARIABLES.items():
        client = mounted(SCRIPT_NAME='/garden', **{variable: nothing})
        assert_error(client.add(FERN), value)
    client = mounted(SCRIPT_NAME=nothing, QUERY_STRING=nothing)
    assert client.add(FERN).json == FERN_ANSWER
