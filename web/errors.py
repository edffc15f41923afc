"""The errors of the interface: their values, and the answer to each exception."""

import enum
import logging
from typing import Any

import falcon

from store import IdTaken, StoreError
from store.base import to_json

log = logging.getLogger('plants')

FAULT = 'plants.fault'  # in a WSGI environment: why the server refuses the request


class ErrorValue(enum.IntEnum):
    """The ``error`` member of an ``Error``: its first three digits are the status."""

    BAD_REQUEST = 400_00  # it cannot be understood, or its body ended early
    BODY_MISSING = 400_01
    WRONG_MEDIA_TYPE = 400_02
    BODY_TOO_LARGE = 400_03
    NOT_JSON = 400_04
    NOT_A_NEW_PLANT = 400_05
    ID_TAKEN = 400_06
    NO_TOKEN = 401_00
    INVALID_TOKEN = 401_01
    NO_SUCH_PATH = 404_00
    METHOD_NOT_ALLOWED = 405_00
    INTERNAL = 500_00  # the log has the reason
    STORE_UNAVAILABLE = 503_00


class Fault(Exception):
    """A request ends with an ``Error`` of this value, with a message for people."""

    def __init__(self, value: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.value = value
        self.headers = {k.replace('_', '-'): text for k, text in headers.items()}


def answer(req: Any, resp: falcon.Response, error: Exception, params: object) -> None:
    """Answer an exception with an ``Error``; an error handler of the application."""
    match error:
        case Fault():
            fault = error
        case falcon.HTTPError(status_code=404):
            fault = Fault(ErrorValue.NO_SUCH_PATH, 'no such path; plants go to /plants')
        case falcon.HTTPError():
            fault = Fault(100 * error.status_code, error.description or error.title)
        case IdTaken():
            fault = Fault(ErrorValue.ID_TAKEN, str(error))
        case StoreError():
            log.error('%s: %s', req.id, error)
            reason = getattr(error, 'reason', 'see the log of the server')
            message = f'the store cannot take plants now: {reason}'
            fault = Fault(ErrorValue.STORE_UNAVAILABLE, message, retry_after='1')
        case _:
            log.exception('%s: unexpected exception', req.id)
            fault = Fault(ErrorValue.INTERNAL, 'an unexpected fault of the service')
    req.error = int(fault.value)
    resp.status = falcon.code_to_http_status(req.error // 100)  # agents expect a line
    resp.set_headers(fault.headers)
    resp.content_type = falcon.MEDIA_JSON
    resp.data = to_json({'error': req.error, 'message': str(fault)}).encode()
