"""The contract: ``POST /plants``, errors, paths, methods, headers, the log, CORS."""

import io
import json
import logging
from unittest.mock import MagicMock, Mock

import pytest
from exchange import Client, assert_error
from rawclient import TOKEN

from store import PlantStore, errors

FERN = {'id': 1, 'name': 'Fern', 'tag': 'shade'}
FERN_ANSWER = {'name': 'Fern', 'tag': 'shade'}

PUBLIC = ['/livez', '/readyz', '/openapi.json', '/docs']
# A body that is answered 40000 if it is read.
UNREADABLE = MagicMock(read=Mock(side_effect=ValueError('peer 10.0.0.1 has gone')))


def faulty_store(fault):
    """Return a store of which ``add`` and ``ping`` raise an exception."""
    fail = Mock(side_effect=fault)
    return Mock(PlantStore, add=fail, ping=fail)


def test_chunked_body_is_read_to_its_end(client):
    """A body without a length is read in pieces; it may be empty, endless or broken."""

    def send(body, ended=True):
        headers = {'Content-Type': 'application/json', 'Transfer-Encoding': 'chunked'}
        headers['Content-Length'] = '9'  # RFC 9112, section 6.3: it is ignored
        extra = {'wsgi.input': body, 'wsgi.input_terminated': ended}
        return client.request('/plants', method='POST', headers=headers, environ=extra)

    body = io.BytesIO(json.dumps(FERN).encode().ljust(65_536))
    pieces = MagicMock(read=lambda size: body.read(min(size, 3)))
    assert send(pieces).json == FERN_ANSWER
    assert_error(send(io.BytesIO(b' ' * 65_537)), 40003)
    assert_error(send(io.BytesIO()), 40001)
    assert_error(send(UNREADABLE, False), 40001)
    assert '10.0.0.1' not in assert_error(send(UNREADABLE), 40000)


BODY = json.dumps(FERN).encode()
OURS = ['APPLICATION/Json;', 'application/json; a=4']
OURS += [f'application/json;charset={name}' for name in ('utf-8', '"UTF-8"', 'utf8')]
OTHERS = [None, ';', 'é/ü', 'application/json, a', 'text/json', 'application/jsonp']
OTHERS += ['application/json; charset=latin1']  # RFC 8259, section 8.1
# Error values, with what a body is sent, and a hint in the message.
REFUSED = [
    *[(40000, {'content_length': text}) for text in ('abc', '-1', '1,1', '9' * 5_000)],
    (40000, {'content_length': str(len(BODY) + 1)}),
    *[(40002, {'content_type': text}) for text in OTHERS],
    (40002, {'content_encoding': 'gzip, identity'}),
    (40003, {'body': BODY.ljust(65_537)}),
    (40001, {'body': b''}, 'empty'),
    (40004, {'body': '"é"'.encode('latin-1')}, 'not UTF-8'),
    (40004, {'body': '{}'.encode('utf-8-sig')}, 'byte order mark'),
    (40500, {'method': 'GET'}, 'python -m store list'),
    (40100, {'authorization': 'Basic YTpi'}, 'instead of Basic;'),  # from a .netrc
    (40100, {'authorization': f'{TOKEN} {TOKEN}'}, "Bearer TOKEN';"),
]
ACCEPTED = [{'content_encoding': 'identity'}, {'body': BODY.ljust(65_536)}]
ACCEPTED += [{'content_type': text} for text in OURS]


def test_body_is_json_in_utf_8_of_a_length(client, store):
    """A length is a number; a type may be in any case, with parameters."""
    client.lint = False  # it would refuse such lengths
    for value, how, *hint in REFUSED:
        message = assert_error(client.send(**{'body': BODY, **how}), value)
        assert len(message) < 200
        assert all(text in message for text in hint)
    assert list(store) == []
    for how in ACCEPTED:
        assert client.send(**{'body': BODY, **how}).json == FERN_ANSWER


# Each step corrects what the step before was refused for; the rest stays wrong.
LADDER = [
    (40100, '/nowhere', 'PUT', {'Content-Type': 'x/y', 'Content-Length': '0'}),
    (40101, '/nowhere', 'PUT', {'Authorization': 'Bearer wrong'}),
    (40400, '/nowhere', 'PUT', {'Authorization': f'Bearer {TOKEN}'}),
    (40500, '/plants', 'PUT', {}),
    (40001, '/plants', 'POST', {}),
    (40002, '/plants', 'POST', {'Content-Length': '70000'}),
    (40003, '/plants', 'POST', {'Content-Type': 'application/json'}),
]


def test_first_fault_in_the_order_of_checks_is_answered(anonymous):
    """Of several faults the first is answered; no body is read after a bad head."""
    headers = {}
    for value, path, method, better in LADDER:
        headers |= better
        how = {'headers': headers, 'environ': {'wsgi.input': UNREADABLE}}
        assert_error(anonymous.request(path, method=method, **how), value)


UNKNOWN = ['/', '/plants/', '//plants', '/Plants', '/livez/', '/%2Flivez', '/%00']
UNKNOWN += ['/%ff', '/docs/', '/docs/docs.html', '/docs/../app.py']


def test_path_and_method_are_exact(client, anonymous):
    """Others are 40400, with a token, and 40500, with the methods that are allowed."""
    client.lint = anonymous.lint = False  # it knows fewer methods and paths
    for path in UNKNOWN:
        for method in ('GET', 'POST', 'OPTIONS', 'BREW'):
            assert_error(client.request(path, method=method), 40400)
        assert_error(anonymous.get(path), 40100)
    for path in ('/plants', *PUBLIC):
        own, other = ('POST', 'GET') if path == '/plants' else ('GET, HEAD', 'POST')
        # Falcon knows some of these, and treats the last two in its own way.
        for method in (other, 'PUT', 'TRACE', 'BREW', 'post', 'OPTIONS', 'WEBSOCKET'):
            response = client.request(path, method=method)
            assert_error(response, 40500)
            assert response.headers['Allow'] == own


@pytest.mark.parametrize('prefix', ['/my/garden', '/plants'])
def test_paths_are_those_below_the_prefix(client, prefix):
    """Under any prefix each path works as without one, and so does every refusal."""
    app = client.app

    def mounted(environ, start_response):
        if environ['PATH_INFO'] == '/':
            del environ['PATH_INFO']  # as PEP 3333 allows
        return app({**environ, 'SCRIPT_NAME': prefix}, start_response)

    client, anonymous = Client(mounted, TOKEN), Client(mounted)
    assert client.add(FERN).json == FERN_ANSWER
    assert anonymous.get('/livez').status_int == 200
    assert anonymous.get('/openapi.json').json['servers'][0]['url'] == '.'
    assert_error(anonymous.get('/plants'), 40100)
    assert_error(client.get('/plants/plants'), 40400)
    assert_error(client.get('/'), 40400)
    assert_error(client.get('/plants'), 40500)


def test_public_path_needs_no_token(anonymous):
    """With GET and with HEAD; what is true only now is not kept."""
    for path in PUBLIC:
        wrong = {'Authorization': 'Bearer wrong'}
        response, head = anonymous.get(path, headers=wrong), anonymous.head(path)
        assert (response.status_int, head.status_int, head.body) == (200, 200, b'')
        assert head.headers['Content-Type'] == response.headers['Content-Type']
        cached = 'max-age=0' if path in ('/openapi.json', '/docs') else 'no-store'
        assert response.headers['Cache-Control'] == cached


DAMAGE = errors.StoreCorrupt('/srv/green/plants.jsonl', 7, 300, 'not JSON')
# The value of the answer, what the store raises, and the reason in the message.
FAULTS = [
    (50300, errors.StoreUnavailable('full', store='/srv/green'), 'full'),
    (50300, DAMAGE, ''),
    (50000, KeyError('green'), ''),
]


@pytest.mark.parametrize(('value', 'fault', 'reason'), FAULTS, ids=str)
def test_only_the_log_has_the_details_of_a_fault(value, fault, reason, serve, caplog):
    """A store that fails is 50300, with a reason if it may work soon; others 50000."""
    client = serve(faulty_store(fault))
    for response in client.add(FERN, x_request_id='find-me'), client.get('/readyz'):
        message = assert_error(response, value)
        assert reason in message
        assert 'green' not in str(response.headers)
        for secret in ('/', 'green', 'plants.jsonl', 'repair'):
            assert secret not in message
    caplog.set_level(logging.INFO, 'plants')
    assert client.head('/readyz').status_int == value // 100
    assert f' /readyz {value // 100} ' in caplog.text
    assert client.get('/livez').json == {'status': 'live'}
    assert 'find-me: ' in caplog.text
    assert str(fault) in caplog.text
    assert ('Traceback' in caplog.text) == (value == 50000)


# For 200 and some error values, a request that is answered with it.
REQUESTS = {
    200: lambda client: client.add(FERN),
    40005: lambda client: client.add({}),
    40101: lambda client: client.add(FERN, authorization='Bearer wrong'),
    40400: lambda client: client.add(FERN, path='/nowhere'),
    40500: lambda client: client.add(FERN, path='/livez'),
}


@pytest.mark.parametrize('value', REQUESTS)
def test_answer_is_json_and_logged_with_its_id(value, client, caplog):
    """Whatever is accepted; a line has id, token, method, path, status and value."""
    caplog.set_level(logging.INFO, 'plants')
    request_id = 'Root=1-67891233-abcdef'.ljust(128, 'x')
    client.extra_environ['HTTP_X_REQUEST_ID'] = request_id
    client.extra_environ['HTTP_ACCEPT'] = 'application/xml'
    for probe in PUBLIC[:2]:
        client.get(probe)  # leaves no line, since it is answered 200
    response = REQUESTS[value](client)
    assert response.json.get('error', 200) == value
    assert response.headers['Content-Type'] == 'application/json'
    assert response.headers['X-Request-Id'] == request_id
    name = '-' if value in (40101, 40500) else 'tester'
    path = {40400: '/nowhere', 40500: '/livez'}.get(value, '/plants')
    status = '200 0' if value == 200 else f'{value // 100} {value}'
    (line,) = caplog.messages
    assert line.startswith(f'{request_id} {name} POST {path} {status} ')
    assert line.endswith(f' ms {len(response.body)} bytes')


def test_unusual_request_id_is_replaced(anonymous):
    """An id that is empty, too long or could break a line is replaced by a new one."""
    ids = ['', 'a b', 'x' * 129, 'é', '"a"', 'a\n']
    sent = [{'HTTP_X_REQUEST_ID': id} for id in ids]
    answers = [anonymous.get('/livez', extra_environ=extra) for extra in sent]
    assert len({answer.headers['X-Request-Id'] for answer in answers} - {*ids}) == 6


# ---- CORS: what a page of another origin may do

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
