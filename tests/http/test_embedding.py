"""The application under other WSGI servers."""

import threading
from contextlib import contextmanager, suppress
from wsgiref.validate import validator

import cheroot.wsgi
import pytest
import waitress.server
import waitress.wasyncore
from conftest import Client
from exchange import assert_error, chunked
from server import PATIENCE, TOKEN, RawClient, request
from test_contract import FERN, FERN_ANSWER

from store import Plant

MAX_BODY = 200  # bytes; small, so that a larger body still goes out in one piece


@contextmanager
def in_thread(run, stop):
    """Run a server in a thread while the block lasts."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def served_by_waitress(app):
    """Yield the port where waitress serves an application."""
    sockets = {}
    server = waitress.server.create_server(app, map=sockets, host='127.0.0.1', port=0)

    def stop():
        # In the server's thread: closing a descriptor that it polls would be an error.
        with suppress(OSError):  # it has closed the trigger already
            server.trigger.pull_trigger(lambda: waitress.wasyncore.close_all(sockets))

    with in_thread(server.run, stop):
        yield server.effective_port
    server.task_dispatcher.shutdown()


@contextmanager
def served_by_cheroot(app):
    """Yield the port where cheroot serves an application."""
    server = cheroot.wsgi.Server(('127.0.0.1', 0), app, numthreads=2)
    server.expiration_interval = 0.02  # how soon it notices that it must stop
    server.prepare()
    with in_thread(server.serve, server.stop):
        yield server.bind_addr[1]


def exchange(port, data):
    """Send one request and return its answer."""
    with RawClient(port) as client:
        return client.ask(data)


each_server = pytest.mark.parametrize(
    'served', [served_by_waitress, served_by_cheroot], ids=['waitress', 'cheroot']
)


@each_server
def test_answers_are_valid_wsgi(serve, store, served):
    """Each kind of answer reaches the client, and the WSGI validator finds no fault."""
    app = serve(store, max_body_bytes=MAX_BODY).app
    with served(validator(app)) as port:
        assert_error(exchange(port, request()), 40001)
        assert_error(exchange(port, request(body=b' ' * (MAX_BODY + 1))), 40003)
        options = request('OPTIONS', '/livez', authorization=None)
        assert_error(exchange(port, options), 40500)
        assert exchange(port, request(body=FERN)).json == FERN_ANSWER
    assert list(store) == [Plant(**FERN)]


@pytest.mark.parametrize('length', [None, '10'])  # the chunks say how long the body is
@each_server
def test_chunked_body_is_read(app, store, served, length):
    """A chunked body is read where the server marks its end; bad chunks are 40000."""
    how = {'content_type': 'application/json', 'content_length': length}
    pieces = b'{"id": 1, "name": ', b'"Fern", "tag": "shade"}'
    with served(app) as port:
        answer = exchange(port, chunked(*pieces, **how))
        if served is served_by_cheroot:  # waitress refuses them itself
            bad = exchange(port, chunked(*pieces, end=b'seven\r\n', **how))
            assert_error(bad, 40000)
    assert (answer.status, answer.json) == (200, FERN_ANSWER)
    assert list(store) == [Plant(**FERN)]


@pytest.fixture
def add(app):
    """A function that adds a plant, with variables set, or with None removed."""

    def add(**variables):
        def changed(environ, start_response):
            environ |= variables
            kept = {name: text for name, text in environ.items() if text is not None}
            return app(kept, start_response)

        return Client(changed, TOKEN).add(FERN)

    return add


@pytest.mark.parametrize('nothing', ['', None], ids=['empty', 'absent'])
@pytest.mark.parametrize(
    ('variable', 'value'),
    [
        *[('PATH_INFO', 40400), ('CONTENT_LENGTH', 40001)],
        *[('CONTENT_TYPE', 40002), ('HTTP_AUTHORIZATION', 40100)],
    ],
)
def test_empty_variable_is_like_an_absent_one(add, variable, value, nothing):
    """An empty variable of the environ and an absent one mean the same."""
    assert_error(add(SCRIPT_NAME='/garden', **{variable: nothing}), value)


def test_query_and_prefix_may_be_absent(add):
    """The environ of a server may lack them."""
    assert add(SCRIPT_NAME=None, QUERY_STRING=None).json == FERN_ANSWER
