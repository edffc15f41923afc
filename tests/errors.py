"""A check of error answers, and a store whose methods all fail."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from store.memory import MemoryStore

ROOT = Path(__file__).resolve().parent.parent

# jsonschema itself reads the published file, with none of our code in between.
ERROR = Draft202012Validator(json.loads((ROOT / 'schemas/Error.json').read_bytes()))

CHALLENGES = {
    40100: 'Bearer',
    40101: 'Bearer error="invalid_token"',
    40300: 'Bearer error="insufficient_scope"',
}


class FaultyStore(MemoryStore):
    """A store whose every method raises the same exception."""

    def __init__(self, exception):
        super().__init__()
        self._exception = exception

    def add(self, plant):
        raise self._exception

    ping = __iter__ = lambda self: self.add(None)


def assert_error(response, value):
    """Check that an answer is an ``Error``, with the headers that belong to it.

    Args:
        response: The answer, as WebTest returns it.
        value: The expected ``error``.

    Returns:
        Its ``message``.
    """
    headers = response.headers
    assert response.status_int == value // 100, response.text
    assert headers['Content-Type'] == 'application/json'
    error = json.loads(response.body)
    ERROR.validate(error)
    assert set(error) == {'error', 'message'}
    assert error['error'] == value, error['message']
    assert error['message'].strip()
    challenge = headers.get('WWW-Authenticate', '').partition(', scope=')[0]
    assert challenge == CHALLENGES.get(value, '')
    assert ('Allow' in headers) == (value == 40500)
    assert ('Retry-After' in headers) == (value // 100 == 503)
    assert int(headers.get('Retry-After', 1)) > 0
    return error['message']
