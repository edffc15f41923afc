"""The application below the path of another one, under any WSGI server."""

import pytest
from conftest import Client
from exchange import assert_error
from rawclient import TOKEN
from test_contract import FERN, FERN_ANSWER


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
