"""The errors of the interface: their values, and the answer to each exception."""

import enum
import json
import logging
from typing import Any, Self

import falcon
from falcon import Response

from store import IdTaken, StoreClosed, StoreError, StoreUnavailable

log = logging.getLogger('plants')

# In a WSGI environment: the fault with which the server refuses the request.
FAULT = 'plants.fault'


class ErrorValue(enum.IntEnum):
    """The ``error`` member of an ``Error``: its first three digits are the status."""

    meaning: str  # for people, the same for every request

    BAD_REQUEST = 400_00, 'the request could not be understood, or its body ended early'
    BODY_MISSING = 400_01, 'the body is missing or empty'
    WRONG_MEDIA_TYPE = 400_02, 'the media type is not application/json'
    BODY_TOO_LARGE = 400_03, 'the body is larger than the limit'
    NOT_JSON = 400_04, 'the body is not JSON'
    NOT_A_NEW_PLANT = 400_05, 'the body is JSON, but not a NewPlant'
    ID_TAKEN = 400_06, 'the id is taken by a different plant'
    NO_TOKEN = 401_00, 'there is no bearer token'
    INVALID_TOKEN = 401_01, 'the token is not valid'
    NO_SUCH_PATH = 404_00, 'there is no such path'
    METHOD_NOT_ALLOWED = 405_00, 'the method is not allowed here'
    INTERNAL = 500_00, 'an unexpected fault of the service'
    STORE_UNAVAILABLE = 503_00, 'the store cannot take plants now'

    def __new__(cls, value: int, meaning: str = '') -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class Fault(Exception):
    """A request ends with an ``Error``."""

    def __init__(self, value: int, message: str = '', **headers: str) -> None:
        self.value = value  # the error of the response, which also gives the status
        self.headers = headers  # of the response, with _ for - in their names
        super().__init__(message or ErrorValue(value).meaning)  # for people


def answer(req: Any, resp: Response, ex: Exception, params: object) -> None:
    """Answer an exception with an ``Error``; an error handler of the application."""
    fault = _as_fault(ex, req.id)
    req.error = int(fault.value)
    # A status line: agents that wrap Falcon expect one.
    resp.status = falcon.code_to_http_status(fault.value // 100)
    for name, text in fault.headers.items():
        resp.set_header(name.replace('_', '-'), text)
    resp.content_type = falcon.MEDIA_JSON
    error = {'error': int(fault.value), 'message': str(fault)}
    resp.data = json.dumps(error, ensure_ascii=False).encode()


def _as_fault(ex: Exception, request_id: str) -> Fault:
    """Return the fault that answers an exception; log the faults of the server."""
    match ex:
        case Fault():
            return ex
        case falcon.HTTPError(status_code=404):
            return Fault(ErrorValue.NO_SUCH_PATH, 'no such path; plants go to /plants')
        case falcon.HTTPError():
            return Fault(100 * ex.status_code, ex.description or ex.title)
        case IdTaken():
            return Fault(ErrorValue.ID_TAKEN, str(ex))
        case StoreError():
            log.error('%s: %s', request_id, ex)
            value = ErrorValue.STORE_UNAVAILABLE
            if isinstance(ex, StoreUnavailable):
                return Fault(value, f'{value.meaning}: {ex.reason}', retry_after='1')
            reason = ex if isinstance(ex, StoreClosed) else 'see the log of the server'
            return Fault(value, f'{value.meaning}: {reason}', retry_after='60')
        case _:
            log.exception('%s: unexpected exception', request_id)
            return Fault(ErrorValue.INTERNAL)
