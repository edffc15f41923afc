"""A client of the application without a server: WebTest, which also checks WSGI."""

import json
import warnings

from rawclient import TOKEN

with warnings.catch_warnings():
    # WebOb imports cgi, which warns that it will be removed.
    warnings.simplefilter('ignore', DeprecationWarning)
    from webtest import TestApp

# One character longer than TOKEN. No message may show either.
OTHER = f'{TOKEN}r'


class Client(TestApp):
    """A client that returns answers of any status, errors included."""

    def __init__(self, app, token=None):
        super().__init__(app)
        self.authorization = ('Bearer', token) if token else None

    def do_request(self, req, status=None, expect_errors=None):
        return super().do_request(req, status, expect_errors=True)

    def send(self, body, path='/plants', method='POST', **headers):
        """Send bytes; write header names with underscores; None leaves a header out."""
        headers = {'content_type': 'application/json', **headers}
        given = {name: text for name, text in headers.items() if text is not None}
        sent = {name.replace('_', '-'): text for name, text in given.items()}
        return self.request(path, method=method, body=body, headers=sent)

    def add(self, plant, **options):
        """Post a plant, or any other value, as JSON; the options are ``send``'s."""
        return self.send(json.dumps(plant).encode(), **options)
