"""CORS: what a page of another origin may do."""

import pytest
from exchange import assert_error
from test_contract import FERN, REQUESTS

PAGE = 'https://a.example'


@pytest.fixture(params=['*', PAGE])
def allowed(request):
    """What ``Access-Control-Allow-Origin`` then is: all origins, or the page's."""
    return request.param


@pytest.fixture
def client(serve, store, allowed):
    """Return a client with the token."""
    origins = '*' if allowed == '*' else [PAGE, 'http://localhost:3000']
    return serve(store, cors_origins=origins)


def preflight(client, path='/plants', origin=PAGE):
    """Send a preflight as a browser does, without a token."""
    names = 'Access-Control-Request-Method', 'Access-Control-Request-Headers'
    headers = dict(zip(names, ('POST', 'authorization,content-type'), strict=True))
    return client.options(path, headers={'Origin': origin, **headers})


def assert_readable(answer, allowed):
    """Check that a page of the origin can read the answer and its headers."""
    assert answer.headers['Access-Control-Allow-Origin'] == allowed
    exposed = answer.headers['Access-Control-Expose-Headers'].split(', ')
    assert exposed == ['X-Request-Id', 'Retry-After']
    assert 'Access-Control-Allow-Credentials' not in answer.headers
    assert answer.headers['Vary'] == 'Origin'


@pytest.mark.parametrize('path', ['/plants', '/no/such/path'])
def test_preflight_is_answered_without_a_token(anonymous, allowed, path):
    """A preflight has no body, and is the same for every path."""
    answer = preflight(anonymous, path)
    assert (answer.status_code, answer.body) == (204, b'')
    assert_readable(answer, allowed)
    assert answer.headers['Access-Control-Allow-Methods'] == 'GET, HEAD, POST'
    names = answer.headers['Access-Control-Allow-Headers']
    assert names == 'authorization,content-type'
    assert 'X-Request-Id' in answer.headers


def test_page_can_read_every_answer(client, anonymous, store, allowed):
    """Answers of every kind can be read, errors included."""
    client.extra_environ['HTTP_ORIGIN'] = PAGE
    for request in REQUESTS.values():
        assert_readable(request(client), allowed)
    assert_readable(anonymous.add(FERN, origin=PAGE), allowed)
    store.close()
    unavailable = client.add(FERN)
    assert_error(unavailable, 50300)
    assert_readable(unavailable, allowed)


def test_options_that_is_no_preflight_is_refused(client, anonymous):
    """OPTIONS that is no preflight is 401 without a token, and 405 with one."""
    for origin in ({'Origin': PAGE}, {}):
        assert_error(anonymous.options('/plants', headers=origin), 40100)
        assert_error(client.options('/plants', headers=origin), 40500)


@pytest.mark.parametrize('origin', ['https://b.example', 'null', f'{PAGE}.evil'])
def test_page_of_an_unlisted_origin_reads_nothing(serve, store, origin):
    """A page of another origin may send nothing, and cannot read any answer."""
    client = serve(store, cors_origins=PAGE)
    for answer in preflight(client, origin=origin), client.add(FERN, origin=origin):
        assert not [name for name in answer.headers if name.startswith('Access-')]
        assert answer.headers['Vary'] == 'Origin'


def test_without_origins_there_is_no_cors(serve, store):
    """A preflight is then any OPTIONS, and no header is added."""
    refused = preflight(serve(store))
    assert_error(refused, 40500)
    assert not [
        name for name in refused.headers if name.startswith(('Access-', 'Vary'))
    ]
