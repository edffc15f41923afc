"""CORS: what a page of another origin may do."""

import pytest
from exchange import assert_error
from test_contract import FERN, REQUESTS

PAGE = 'https://a.example'
# The setting, and what ``Access-Control-Allow-Origin`` then is.
ALLOWED = [('*', '*'), ([PAGE, 'http://localhost:3000'], PAGE)]


def preflight(client, path='/plants', origin=PAGE):
    """Send a preflight as a browser does, without a token."""
    client.authorization = None
    headers = {
        'Origin': origin,
        'Access-Control-Request-Method': 'POST',
        'Access-Control-Request-Headers': 'authorization,content-type',
    }
    return client.options(path, headers=headers)


def has_cors(answer):
    """Whether an answer has a header of CORS."""
    return any(name.startswith('Access-') for name in answer.headers)


@pytest.mark.parametrize(('origins', 'allowed'), ALLOWED)
def test_page_can_read_every_answer(serve, store, origins, allowed):
    """Answers of every kind can be read, errors and preflights included."""
    client = serve(store, cors_origins=origins)
    client.extra_environ['HTTP_ORIGIN'] = PAGE
    answers = [request(client) for request in REQUESTS.values()]
    store.close()
    answers += [client.add(FERN), preflight(client), preflight(client, '/no')]
    assert [answer.status_int for answer in answers[-3:]] == [503, 204, 204]
    for answer in answers:
        assert answer.headers['Access-Control-Allow-Origin'] == allowed
        exposed = answer.headers['Access-Control-Expose-Headers']
        assert exposed == 'X-Request-Id, Retry-After'
        assert 'Access-Control-Allow-Credentials' not in answer.headers
        assert answer.headers['Vary'] == 'Origin'
        assert 'X-Request-Id' in answer.headers
    for answer in answers[-2:]:
        assert answer.body == b''
        assert answer.headers['Access-Control-Allow-Methods'] == 'GET, HEAD, POST'
        names = answer.headers['Access-Control-Allow-Headers']
        assert names == 'authorization,content-type'


def test_options_that_is_no_preflight_is_refused(serve, store):
    """OPTIONS that is no preflight is 405 with a token, and 401 without one."""
    client = serve(store, cors_origins='*')
    for value in (40500, 40100):
        for origin in ({'Origin': PAGE}, {}):
            assert_error(client.options('/plants', headers=origin), value)
        client.authorization = None


@pytest.mark.parametrize('origin', ['https://b.example', 'null', f'{PAGE}.evil'])
def test_page_of_an_unlisted_origin_reads_nothing(serve, store, origin):
    """A page of another origin may send nothing, and cannot read any answer."""
    client = serve(store, cors_origins=PAGE)
    for answer in client.add(FERN, origin=origin), preflight(client, origin=origin):
        assert not has_cors(answer)
        assert answer.headers['Vary'] == 'Origin'


def test_without_origins_there_is_no_cors(serve, store):
    """A preflight is then any OPTIONS, and no header is added."""
    refused = preflight(serve(store))
    assert_error(refused, 40100)
    assert not has_cors(refused)
    assert 'Vary' not in refused.headers
