"""The application under another WSGI server, and below the path of another one."""

import threading
from contextlib import contextmanager

import pytest
from conftest import Client
from exchange import assert_error, chunked
from rawclient import TOKEN, RawClient, request
from test_contract import FERN, FERN_ANSWER
from werkzeug.serving import make_server


@contextmanager
def served_by_werkzeug(app):
    """Yield the port where another server, with a thread a request, serves."""
    with make_server('127.0.0.1', 0, app, threaded=True) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server.port
        server.shutdown()
        thread.join()


def test_another_server_serves_the_application(serve, store):
    """Bodies of each framing, of any size and none, are read as under ours."""
    app = serve(store, max_body_bytes=200).app
    requests = {
        200: request(body=FERN),
        40001: request(),
        40003: request(body=b' ' * 201),
        40005: chunked(b'{"id": 2, "na', b'me": 3}', content_type='application/json'),
    }
    with served_by_werkzeug(app) as port:
        for value, data in requests.items():
            with RawClient(port) as client:
                answer = client.ask(data)
            if value == 200:
                assert answer.json == FERN_ANSWER
            else:
                assert_error(answer, value)


@pytest.fixture
def mounted(client):
    """A function: a client of the application, with variables set, or None removed."""

    def mounted(**variables):
        def changed(environ, start_response):
            environ |= variables
            kept = {name: text for name, text in environ.items() if text is not None}
            return client.app(kept, start_response)

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
