"""CORS: what a page of another origin may do."""

import pytest
from exchange import assert_error
from test_contract import FERN, REQUESTS

PAGE = 'https://a.example'
SENT, EXPOSED = 'authorization,content-type', 'X-Request-Id, Retry-After'
# The setting, and what ``Access-Control-Allow-Origin`` then is.
ALLOWED = [('*', '*'), ([PAGE, 'http://localhost:3000'], PAGE)]


def preflight(client, path='/plants', origin=PAGE):
    """Send a preflight as a browser does, without a token."""
    client.authorization = None
    headers = {'Origin': origin, 'Access-Control-Request-Method': 'POST'}
    headers['Access-Control-Request-Headers'] = SENT
    return client.options(path, headers=headers)


@pytest.mark.parametrize(('origins', 'allowed'), ALLOWED)
def test_page_can_read_every_answer(serve, store, origins, allowed):
    """Answers of every kind can be read, errors and preflights included."""
    client = serve(store, cors_origins=origins)
    client.extra_environ['HTTP_ORIGIN'] = PAGE
    answers = [request(client) for request in REQUESTS.values()]
    store.close()
    assert_error(client.options('/plants', headers={'Origin': PAGE}), 40500)
    answers += [client.add(FERN), preflight(client), preflight(client, '/no')]
    assert [answer.status_int for answer in answers[-3:]] == [503, 204, 204]
    for answer in answers:
        assert answer.headers['Access-Control-Allow-Origin'] == allowed
        assert answer.headers['Access-Control-Expose-Headers'] == EXPOSED
        assert 'Access-Control-Allow-Credentials' not in answer.headers
        assert answer.headers['Vary'] == 'Origin'
        assert 'X-Request-Id' in answer.headers
    for answer in answers[-2:]:
        assert answer.body == b''
        assert answer.headers['Access-Control-Allow-Methods'] == 'GET, HEAD, POST'
        assert answer.headers['Access-Control-Allow-Headers'] == SENT


@pytest.mark.parametrize('origin', ['https://b.example', 'null', f'{PAGE}.evil'])
@pytest.mark.parametrize('origins', [PAGE, ()])
def test_page_of_an_unlisted_origin_reads_nothing(serve, store, origin, origins):
    """A page of another origin may send nothing, and cannot read any answer."""
    client = serve(store, cors_origins=origins)
    for answer in client.add(FERN, origin=origin), preflight(client, origin=origin):
        assert not [name for name in answer.headers if name.startswith('Access-')]
        assert answer.headers.get('Vary') == ('Origin' if origins else None)
    assert answer.status_int == (204 if origins else 401)
