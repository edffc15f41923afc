"""The plant store over HTTP: a WSGI application.

    POST /plants          200, 400, 401, 500, 503    add a plant
    GET  /livez           200                        the process answers
    GET  /readyz          200, 503                   an add would work now
    GET  /openapi.json    200                        the description of all this
    GET  /docs            200, 404                   a page to try it on
    GET  /metrics         200, 401                   what Prometheus reads, if it is on

HEAD goes where GET does. All else is refused: 401, 404, 405. Every answer that is not
200 is an ``Error`` (``schemas/Error.json``); ``ErrorValue`` lists its values.

``create_app`` is for those who embed the service: it is given everything it needs.
``app:app`` is for servers: it reads the environment (``Settings``) when it is first
looked at, so that importing this module does nothing.
"""

from __future__ import annotations

import atexit
import enum
import hashlib
import hmac
import json
import logging
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from functools import lru_cache
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from typing import Literal
from urllib.parse import quote

import falcon
from falcon import Request
from falcon import Response

import schemas
from schemas import openapi
from store import Create
from store import IdTaken
from store import Plant
from store import PlantStore
from store import StoreError
from store import StoreUnavailable
from store import open_store

log = logging.getLogger('plants')

DEFAULT_MAX_BODY_BYTES = 65_536
# Not settings: what gunicorn.conf.py leaves in the environment for workers to come.
STORE_EXISTS = '_PLANTS_STORE_EXISTS'
LAST_TOKENS = '_PLANTS_LAST_TOKENS'


class ErrorValue(enum.IntEnum):
    """The ``error`` member of an ``Error``: HTTP status times 100, plus n.

    Attributes:
        meaning: What it says, whatever the request was, in words for a person.
    """

    meaning: str

    BAD_REQUEST = 400_00, 'the request could not be understood, or its body broke off'
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

    def __new__(cls, value: int, meaning: str) -> ErrorValue:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @property
    def status(self) -> int:
        return self // 100


class Fault(Exception):
    """A request ends with an ``Error``.

    Attributes:
        value: Its ``error``, which also gives the HTTP status.
        message: Its ``message``, for a person.
        headers: What the answer must carry besides.
    """

    def __init__(self, value: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.value = value
        self.message = message
        self.headers = headers


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        store: URL of the store.
        tokens: Which tokens are accepted; ``None`` if nothing is configured.
        max_body_bytes: The longest body that is read.
        log: ``text`` or ``json``; whoever makes the lines of the log looks at it.
        metrics: Whether ``/metrics`` is served.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.
    """

    store: str
    tokens: Tokens | None
    max_body_bytes: int
    log: str
    metrics: bool
    cors_origins: tuple[str, ...]

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the ``PLANTS_`` variables.

        Raises:
            ValueError: One has a bad value; the message is a sentence for the operator.
        """
        return cls(
            store=_store_url(environ.get('PLANTS_STORE', 'jsonl:plants.jsonl')),
            tokens=_tokens(
                environ.get('PLANTS_TOKENS'),
                environ.get('PLANTS_TOKENS_FILE'),
                environ.get(LAST_TOKENS),
            ),
            max_body_bytes=_positive(
                'PLANTS_MAX_BODY',
                environ.get('PLANTS_MAX_BODY', str(DEFAULT_MAX_BODY_BYTES)),
            ),
            log=_one_of(environ, 'PLANTS_LOG', 'text', 'json'),
            metrics=_one_of(environ, 'PLANTS_METRICS', '0', '1') == '1',
            cors_origins=_cors_origins(environ.get('PLANTS_CORS_ORIGINS')),
        )


def _store_url(url: str) -> str:
    try:
        open_store(url)
    except ValueError as ex:
        raise ValueError(f'PLANTS_STORE: {ex}') from ex
    return url


def _positive(variable: str, text: str) -> int:
    if not re.fullmatch('[1-9][0-9]{0,17}', text):
        raise ValueError(f'{variable}: {text!r} is not a positive number of bytes')
    return int(text)


def _one_of(environ: Mapping[str, str], variable: str, default: str, other: str) -> str:
    value = environ.get(variable, default)
    if value not in (default, other):
        raise ValueError(f'{variable}: {value!r} is not {default} or {other}')
    return value


def _cors_origins(listed: str | None) -> tuple[str, ...]:
    if listed is None:
        return ()
    origins = tuple(map(str.strip, listed.split(',')))
    try:
        CrossOrigin(origins)
    except ValueError as ex:
        raise ValueError(f'PLANTS_CORS_ORIGINS: {ex}') from ex
    return origins


def _tokens(listed: str | None, path: str | None, last: str | None) -> Tokens | None:
    if listed is not None and path is not None:
        raise ValueError('PLANTS_TOKENS and PLANTS_TOKENS_FILE are both set: use one')
    if path is not None:
        try:
            accepted = Tokens.parse(last.split('\n')) if last else None
            return TokensFile(Path(path), accepted)
        except OSError as ex:
            raise ValueError(f'PLANTS_TOKENS_FILE: {path}: {ex.strerror}') from ex
        except ValueError as ex:
            raise ValueError(f'PLANTS_TOKENS_FILE: {path}: {ex}') from ex
    if listed is not None:
        try:
            return Tokens.of(filter(None, map(str.strip, listed.split(','))))
        except ValueError as ex:
            raise ValueError(f'PLANTS_TOKENS: {ex}') from ex
    return None


class Tokens:
    """The accepted bearer tokens, kept as digests.

    Args:
        names: From the SHA-256 digest of a token to the token's name, for the log.

    Raises:
        ValueError: There is none, or a name could break a line of the log.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        if not names:
            raise ValueError('there is no token')
        if not all(name.isprintable() for name in names.values()):
            raise ValueError('the name of a token has only printable characters')
        self._names = dict(names)

    def __len__(self) -> int:
        return len(self._names)

    @classmethod
    def of(cls, tokens: Iterable[str] | Mapping[str, str]) -> Tokens:
        """Accept tokens, from a mapping by their names or else called by their numbers.

        ``sha256:`` and 64 hexadecimal digits stand for the token with that digest.

        Raises:
            ValueError: There is none, or no header could hold one; the message has its
                name, never its text.
        """
        if not isinstance(tokens, Mapping):
            tokens = {f'token-{number}': text for number, text in enumerate(tokens, 1)}
        return cls({_digest(text, name): name for name, text in tokens.items()})

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Tokens:
        """Read the lines of a file: TOKEN or NAME TOKEN; # begins a comment.

        Raises:
            ValueError: A line is neither, or there is no token; the message has its
                number, never its text.
        """
        names = {}
        for number, line in enumerate(lines, 1):
            words = re.split(r'(?:^|\s)#', line)[0].split()
            if len(words) > 2:
                raise ValueError(f'line {number}: it is not TOKEN or NAME TOKEN')
            if words:
                name = words[0] if len(words) == 2 else f'token-{number}'
                names[_digest(words[-1], f'line {number}')] = name
        return cls(names)

    def __str__(self) -> str:
        """Return lines that ``parse`` reads, with digests for the tokens."""
        return '\n'.join(f'{n} sha256:{d.hex()}' for d, n in self._names.items())

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, or ``None`` if it is not accepted.

        It takes the same time whichever token it is, and however much of it is right.
        """
        digest = hashlib.sha256(token.encode('latin-1')).digest()
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def _digest(token: str, where: str) -> bytes:
    """Return the SHA-256 digest that a token is kept as, or stands for."""
    if not isinstance(token, str):
        raise ValueError(f'{where}: a token is text')
    scheme, colon, digits = token.partition(':')
    if colon:
        if scheme != 'sha256' or not re.fullmatch('[0-9a-fA-F]{64}', digits):
            raise ValueError(f'{where}: it is not sha256: and 64 hexadecimal digits')
        return bytes.fromhex(digits)
    # RFC 6750, section 2.1: b64token.
    if not re.fullmatch(r'[A-Za-z0-9._~+/-]+=*', token):
        raise ValueError(
            f'{where}: a token has only letters, digits and -._~+/, and = at its end'
        )
    return hashlib.sha256(token.encode()).digest()


class TokensFile(Tokens):
    """Tokens in a file, one entry a line, taken up again when the file changes.

    Args:
        path: Of the file.
        accepted: What to accept if the file is broken when it is first read: a worker
            that starts then must not be without tokens.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not right; the message says where.
    """

    CHECK_EVERY = 0.5  # seconds

    def __init__(self, path: Path, accepted: Tokens | None = None) -> None:
        self._path = path
        self._next_check = time.monotonic() + self.CHECK_EVERY
        self._version = self._stat()
        try:
            names = self._read()
        except (OSError, ValueError) as ex:
            if accepted is None:
                raise
            last = 'those of the last start or reload are accepted'
            log.error('%s: %s; %s', path, ex, last)
            names = accepted._names
        super().__init__(names)

    def name_of(self, token: str) -> str | None:
        now = time.monotonic()
        if now >= self._next_check:
            # Two threads may both come here, and both read the same file.
            self._next_check = now + self.CHECK_EVERY
            self._refresh()
        return super().name_of(token)

    def _refresh(self) -> None:
        version = self._stat()
        if version == self._version:
            return
        self._version = version
        try:
            self._names = self._read()
        except (OSError, ValueError) as ex:
            log.error('%s: %s; the tokens stay as they were', self._path, ex)
        else:
            log.info('%s: %d tokens are accepted now', self._path, len(self))

    def _stat(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _read(self) -> dict[bytes, str]:
        lines = self._path.read_text('utf-8-sig').split('\n')
        return Tokens.parse(lines)._names


class Context:
    """What the middleware notes of a request while it is served."""

    id = '-'
    token_name: str | None = None
    error = 0
    began = 0.0
    # How far the body was read: not at all, to its end, or to where it broke off.
    body: Literal['unread', 'read', 'broken'] = 'unread'


class PlantsRequest(Request):
    """A request with our context."""

    context_type = Context
    context: Context  # type: ignore[assignment]

    def __init__(
        self, env: dict[str, Any], options: falcon.RequestOptions | None = None
    ) -> None:
        env.setdefault('PATH_INFO', '')  # PEP 3333: it may be absent when it is empty
        super().__init__(env, options)
        if self.method == 'WEBSOCKET':
            # Falcon keeps this name for itself and refuses it before any middleware
            # runs. In lower case it is a method like any other that we do not have.
            self.method = 'websocket'


class CrossOrigin(falcon.CORSMiddleware):  # type: ignore[type-arg]
    """Middleware: let pages of other origins send requests and read the answers.

    Falcon's, with two differences. A preflight (Fetch standard, section 3.3.2) is
    answered before anybody looks for a token, which browsers do not send with it; to
    tell no stranger which paths exist, it is answered alike for all of them. It is the
    only OPTIONS request that is answered. And an answer that depends on the origin
    says so (``Vary``).

    Cookies and the like (credentials, in the standard's words) stay forbidden: a bearer
    token is a header that a page sets by itself.

    Args:
        origins: What browsers send as ``Origin``; ``*`` alone stands for all of them.

    Raises:
        ValueError: There is none, or one that no browser sends.
    """

    # As browsers write it: in lower case, without a path (RFC 6454, section 6.2).
    ORIGIN = re.compile(r'[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?')

    def __init__(self, origins: Iterable[str]) -> None:
        origins = [origins] if isinstance(origins, str) else list(origins)
        for origin in origins or ['']:
            if origins != ['*'] and not self.ORIGIN.fullmatch(origin):
                raise ValueError(
                    f'{origin!r} is not an origin like https://example.org, '
                    f'in lower case and with nothing behind it, nor is it * alone'
                )
        super().__init__(
            '*' if origins == ['*'] else origins,
            expose_headers=['X-Request-Id', 'Retry-After'],
        )

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        if (
            req.method == 'OPTIONS'
            and 'HTTP_ACCESS_CONTROL_REQUEST_METHOD' in req.env
            and (
                self.allow_origins == '*'
                or req.env.get('HTTP_ORIGIN') in self.allow_origins
            )
        ):
            resp.status = 204
            # Falcon makes the answer's Access-Control-Allow-Methods of it.
            resp.set_header('Allow', 'GET, HEAD, POST')
            resp.complete = True

    def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        super().process_response(req, resp, resource, req_succeeded)
        if self.allow_origins != '*':
            resp.append_header('Vary', 'Origin')


class BearerAuth:
    """Middleware: no responder runs without a valid bearer token (RFC 6750).

    It runs before the body is read and before the router, so a path that does not
    exist answers 401 to a stranger, not 404.

    Args:
        tokens: Which tokens are accepted.
        public: Paths that need none.
    """

    def __init__(self, tokens: Tokens, public: Iterable[str]) -> None:
        self._tokens = tokens
        self._public = frozenset(public)

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        if req.path in self._public:
            return
        scheme, _, token = (req.auth or '').partition(' ')
        token = token.strip(' \t')
        if scheme.lower() != 'bearer' or not token:
            raise Fault(
                ErrorValue.NO_TOKEN,
                'send the header Authorization: Bearer and a token',
                www_authenticate='Bearer',
            )
        req.context.token_name = name = self._tokens.name_of(token)
        if name is None:
            raise Fault(
                ErrorValue.INVALID_TOKEN,
                'the token is not valid',
                www_authenticate='Bearer error="invalid_token"',
            )


class StrictRouting:
    """Middleware: another way to write a path is 404, a method without a responder 405.

    Falcon takes ``//plants`` for ``/plants``, answers OPTIONS by itself, and 400 to a
    method it has never heard of.
    """

    def process_resource(
        self,
        req: PlantsRequest,
        resp: Response,
        resource: object,
        params: dict[str, Any],
    ) -> None:
        if req.path != req.uri_template:
            raise _no_such_path()
        method = req.method
        if not hasattr(resource, f'on_{method.lower()}') or not method.isupper():
            own = [name[3:].upper() for name in dir(resource) if name.startswith('on_')]
            raise Fault(
                ErrorValue.METHOD_NOT_ALLOWED,
                f'the method is not allowed here; allowed: {", ".join(own)}',
                allow=', '.join(own),
            )


def _no_such_path() -> Fault:
    return Fault(ErrorValue.NO_SUCH_PATH, 'there is no such path')


# A path in the log breaks no line. Nearly always it is the same.
_quote = lru_cache(maxsize=256)(quote)


class RequestLog:
    """Middleware: give each request an id, and the log a line about it.

    A handler that wants the members of the line apart finds them in the record's
    ``args``, which is a mapping.
    """

    # What a client may choose: nothing that could break a line or a header.
    SANE_ID = re.compile(r'[A-Za-z0-9._~+/=:@-]{1,128}')
    LINE = (
        '%(request_id)s %(token)s %(method)s %(path)s %(status)d %(error)d '
        '%(duration_ms).1f ms %(bytes)d bytes'
    )

    def process_request(self, req: PlantsRequest, resp: Response) -> None:
        req.context.began = time.perf_counter()
        id = req.env.get('HTTP_X_REQUEST_ID')
        if id is None or not self.SANE_ID.fullmatch(id):
            id = f'{random.getrandbits(64):016x}'
        req.context.id = id
        resp.set_header('X-Request-Id', id)

    def process_response(
        self, req: PlantsRequest, resp: Response, resource: object, succeeded: bool
    ) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        context = req.context
        members = {
            'message': 'request',
            'request_id': context.id,
            'token': context.token_name or '-',
            'method': _quote(req.method),
            # NOTE: without the query: a token may be in it.
            'path': _quote(req.path),
            'status': resp.status_code,
            'error': context.error,
            'duration_ms': round(1000 * (time.perf_counter() - context.began), 3),
            'bytes': 0 if req.method == 'HEAD' else len(resp.data or b''),
        }
        log.info(self.LINE, members)


class Metrics:
    """Middleware and resource: measure, and answer ``/metrics``.

    If ``PROMETHEUS_MULTIPROC_DIR`` is set (``gunicorn.conf.py`` does), the answer is
    about all processes that share the directory, else about this one.

    Args:
        store: Whose syncs are timed.
    """

    SECONDS = (
        *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
        *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    )

    def __init__(self, store: PlantStore) -> None:
        # NOTE: imported here: it takes a while, and is needed only if this is on.
        import prometheus_client
        from prometheus_client.multiprocess import MultiProcessCollector

        self._prometheus = prometheus_client
        self._registry = self._scraped = prometheus_client.CollectorRegistry()
        if 'PROMETHEUS_MULTIPROC_DIR' in os.environ:
            self._scraped = prometheus_client.CollectorRegistry()
            MultiProcessCollector(self._scraped)  # type: ignore[no-untyped-call]
        self._requests = prometheus_client.Histogram(
            'plants_request_seconds',
            'Time from the head of a request to its answer.',
            ['path', 'status', 'error'],
            buckets=self.SECONDS,
            registry=self._registry,
        )
        # NOTE: finding one by its labels costs more than counting.
        self._series: dict[tuple[str, int, int], prometheus_client.Histogram] = {}
        self._syncs = prometheus_client.Histogram(
            'plants_store_sync_seconds',
            'Time that the store took to sync a batch of plants.',
            buckets=(0.0001, 0.00025, *self.SECONDS),
            registry=self._registry,
        )
        self._batches = prometheus_client.Histogram(
            'plants_store_batch_plants',
            'How many plants were synced together.',
            buckets=[2**power for power in range(9)],
            registry=self._registry,
        )
        store.observe_syncs(self._observe_sync)

    def process_response(
        self, req: PlantsRequest, resp: Response, resource: object, succeeded: bool
    ) -> None:
        # The path of a route, since strangers may ask for any number of others.
        labels = req.uri_template or '', resp.status_code, req.context.error
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._requests.labels(*labels)
        series.observe(time.perf_counter() - req.context.began)

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        resp.content_type = self._prometheus.CONTENT_TYPE_LATEST
        resp.data = self._prometheus.generate_latest(self._scraped)

    on_head = on_get

    def _observe_sync(self, plants: int, seconds: float) -> None:
        self._batches.observe(plants)
        self._syncs.observe(seconds)


class AnnouncedClose:
    """Middleware: a body that was not read to its end closes the connection.

    What is left of it stands where the next request should be. A server reads a short
    rest away by itself; after a long one it closes, and the client must be told in this
    answer, or its next request fails. PEP 3333 keeps ``Connection`` from applications,
    so the server says how: ``gunicorn.conf.py`` puts ``force_close`` on the input.
    """

    # Of a rest as long as this gunicorn reads no more than a part.
    LONG = 65_536

    def process_response(
        self, req: PlantsRequest, resp: Response, resource: object, succeeded: bool
    ) -> None:
        body = req.context.body
        if body == 'broken' or (body == 'unread' and _has_long_body(req, self.LONG)):
            force_close = getattr(req.stream, 'force_close', None)
            if force_close is not None:
                force_close()


def _has_long_body(req: PlantsRequest, length: int) -> bool:
    if 'HTTP_TRANSFER_ENCODING' in req.env:
        return True
    announced = req.env.get('CONTENT_LENGTH') or '0'
    # NOTE: int() refuses thousands of digits with an exception.
    digits = announced.lstrip('0')[:18] or '0'
    return not announced.isdecimal() or int(digits) >= length


class PlantsResource:
    """``/plants``.

    Args:
        store: Where the plants go.
        max_body_bytes: The longest body that is read.
    """

    def __init__(self, store: PlantStore, max_body_bytes: int) -> None:
        self._store = store
        self._max_body_bytes = max_body_bytes
        self._schema = schemas.Schema('NewPlant')

    def on_post(self, req: PlantsRequest, resp: Response) -> None:
        """Add a plant; answer it without its id."""
        new_plant = self._read_new_plant(req)
        plant = Plant(new_plant['id'], new_plant['name'], new_plant.get('tag'))
        self._store.add(plant)
        answer = {'name': plant.name}
        if plant.tag is not None:
            answer['tag'] = plant.tag
        _set_json(resp, answer)

    def _read_new_plant(self, req: PlantsRequest) -> dict[str, Any]:
        body = _read_body(req, self._max_body_bytes)
        try:
            new_plant: dict[str, Any] = self._schema.read(body)
        except schemas.NotJSON as ex:
            raise Fault(ErrorValue.NOT_JSON, f'the body is not JSON: {ex}') from ex
        except schemas.Invalid as ex:
            raise Fault(ErrorValue.NOT_A_NEW_PLANT, str(ex)) from ex
        return new_plant


def _read_body(req: PlantsRequest, limit: int) -> bytes:
    """Return the body of a request that must have one, of type application/json.

    Args:
        req: The request.
        limit: The longest body to read, in bytes.

    Raises:
        Fault: The body is missing, too large, of another type, or ends too early.
    """
    # RFC 9112, section 6.3: a chunked body has no length, whatever Content-Length says.
    # Only a server that marks its end in the input (wsgi.input_terminated) lets it be
    # read; elsewhere it is as good as missing.
    chunked = 'HTTP_TRANSFER_ENCODING' in req.env
    length = None if chunked else req.content_length
    if chunked and not req.env.get('wsgi.input_terminated'):
        raise Fault(ErrorValue.BODY_MISSING, 'send the body with a Content-Length')
    if not length and not chunked:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is missing')
    _check_media_type(req)
    body = b''
    if length is None or length <= limit:
        body = _read_up_to(req, limit + 1 if length is None else length)
    if (length or len(body)) > limit:
        raise Fault(ErrorValue.BODY_TOO_LARGE, f'the body is larger than {limit} bytes')
    if length is not None and len(body) < length:
        req.context.body = 'broken'
        raise Fault(
            ErrorValue.BAD_REQUEST,
            f'the body ended after {len(body)} of {length} bytes',
        )
    req.context.body = 'read'
    if not body:
        raise Fault(ErrorValue.BODY_MISSING, 'the body is empty')
    return body


def _read_up_to(req: PlantsRequest, size: int) -> bytes:
    pieces = []
    try:
        # NOTE: a read may return less than it was asked for before the end.
        while size and (piece := req.stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
    except Exception as ex:
        # The framing of the body is broken, or the client has gone away: what the
        # server raises then is its own, and none of it is a fault of ours.
        req.context.body = 'broken'
        raise Fault(ErrorValue.BAD_REQUEST, 'the body could not be read') from ex
    return b''.join(pieces)


def _check_media_type(req: PlantsRequest) -> None:
    content_type = req.content_type
    if content_type != 'application/json':  # spares nearly every request the parsing
        content_type, parameters = falcon.parse_header(content_type or '')
        if parameters.get('charset', 'utf-8').lower() != 'utf-8':
            content_type = ''
    if content_type.lower() != 'application/json':
        raise Fault(
            ErrorValue.WRONG_MEDIA_TYPE, 'the Content-Type must be application/json'
        )
    coding = req.env.get('HTTP_CONTENT_ENCODING', 'identity')
    if coding.lower() != 'identity':
        raise Fault(
            ErrorValue.WRONG_MEDIA_TYPE, 'the body must not have a Content-Encoding'
        )


class LiveResource:
    """``/livez``: the process answers; nothing else is looked at."""

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        _set_json(resp, {'status': 'live'})

    on_head = on_get


class ReadyResource:
    """``/readyz``: an add would work now.

    Args:
        store: Where it would go.
    """

    def __init__(self, store: PlantStore) -> None:
        self._store = store

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        self._store.ping()
        _set_json(resp, {'status': 'ready'})

    on_head = on_get


DOCUMENT_HEADERS = {
    # The page runs its own scripts and speaks to this service, and that is all. The
    # style sheet of Swagger UI has its images in it.
    'Content-Security-Policy': (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    'X-Content-Type-Options': 'nosniff',
}


class DocumentResource:
    """A document for everybody: the description, or a file of the page.

    Args:
        read: Returns its bytes.
        media_type: What they are.
        max_age: How long a client may use them again, in seconds.
    """

    def __init__(
        self, read: Callable[[], bytes], media_type: str, max_age: int = 0
    ) -> None:
        self._read = cache(read)  # shared by all who take their answer slowly
        self._media_type = media_type
        self._headers = {**DOCUMENT_HEADERS, 'Cache-Control': f'max-age={max_age}'}

    def on_get(self, req: PlantsRequest, resp: Response) -> None:
        resp.data = self._read()
        resp.content_type = self._media_type
        resp.set_headers(self._headers)

    on_head = on_get


# The page, by path: file, media type, and for how many seconds it may be used again
# (Swagger UI changes only with its package). What has no row is not served.
PAGE = {
    '/docs': ('docs.html', 'text/html', 0),
    '/docs/docs.js': ('docs.js', 'text/javascript', 0),
    '/docs/swagger-ui.css': ('swagger-ui.css', 'text/css', 86_400),
    '/docs/swagger-ui-bundle.js': ('swagger-ui-bundle.js', 'text/javascript', 86_400),
}


def _page_file(name: str) -> bytes:
    """Return a file of the page: ours, or one of Swagger UI.

    The package that has Swagger UI is found, not imported: that would import Flask.

    Raises:
        Fault: It is not installed.
    """
    package = getattr(find_spec('flask_swagger_ui'), 'origin', None)
    if package is None:
        raise Fault(
            ErrorValue.NO_SUCH_PATH, 'the page needs the package flask-swagger-ui'
        )
    path = schemas.DIRECTORY / name
    if not path.exists():
        path = Path(package).parent / 'dist' / name
    return path.read_bytes()


# NOTE: built once: json.dumps() with arguments builds one at every call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def _set_json(resp: Response, value: object) -> None:
    resp.content_type = 'application/json'
    resp.data = _encode(value).encode()


def _answer_fault(
    req: PlantsRequest, resp: Response, fault: Fault, params: dict[str, Any]
) -> None:
    """Turn a fault into an answer; the only place where an ``Error`` is made."""
    req.context.error = int(fault.value)
    resp.status = fault.value // 100
    for name, text in fault.headers.items():
        resp.set_header(name.replace('_', '-'), text)
    _set_json(resp, {'error': int(fault.value), 'message': fault.message})


def _answer_http_error(
    req: PlantsRequest, resp: Response, ex: falcon.HTTPError, params: dict[str, Any]
) -> None:
    """What Falcon raises by itself: an unknown path, a header it cannot read."""
    if ex.status_code == ErrorValue.NO_SUCH_PATH.status:
        fault = _no_such_path()
    else:
        fault = Fault(100 * ex.status_code, ex.description or ex.title)
    _answer_fault(req, resp, fault, params)


def _answer_store_error(
    req: PlantsRequest, resp: Response, ex: StoreError, params: dict[str, Any]
) -> None:
    if isinstance(ex, IdTaken):
        fault = Fault(ErrorValue.ID_TAKEN, str(ex))
    else:
        log.error('%s: %s', req.context.id, ex)
        reason, retry_after = 'see the log of the server', 60
        if isinstance(ex, StoreUnavailable):
            reason, retry_after = ex.reason, ex.retry_after
        fault = Fault(
            ErrorValue.STORE_UNAVAILABLE,
            f'the store cannot take plants now: {reason}',
            retry_after=str(retry_after),
        )
    _answer_fault(req, resp, fault, params)


def _answer_exception(
    req: PlantsRequest, resp: Response, ex: Exception, params: dict[str, Any]
) -> None:
    log.exception('%s: unexpected exception', req.context.id, exc_info=ex)
    fault = Fault(ErrorValue.INTERNAL, 'an unexpected fault of the service')
    _answer_fault(req, resp, fault, params)


def _documents(max_body_bytes: int) -> dict[str, DocumentResource]:
    """Return the description and the files of the page, by their paths."""
    errors = {value.value: value.meaning for value in ErrorValue}
    description = _encode(openapi.describe(errors, max_body_bytes)).encode()
    return {
        '/openapi.json': DocumentResource(lambda: description, 'application/json')
    } | {
        path: DocumentResource(
            partial(_page_file, name), f'{media_type}; charset=utf-8', max_age
        )
        for path, (name, media_type, max_age) in PAGE.items()
    }


def create_app(
    store: PlantStore,
    *,
    tokens: Tokens | Mapping[str, str] | Iterable[str],
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    metrics: bool = False,
    cors_origins: Iterable[str] = (),
) -> falcon.App[PlantsRequest, Response]:
    """Build the WSGI application.

    Args:
        store: Where the plants go; the caller closes it.
        tokens: The accepted tokens: one, a list, or a mapping from names to tokens,
            each the token itself or ``sha256:`` and its digest; or a ``Tokens``.
        max_body_bytes: The longest body that is read.
        metrics: Whether ``/metrics`` is served, which needs ``prometheus_client``.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.

    Raises:
        ValueError: There is no token, or one that no header could hold, or an origin
            that no browser sends.
    """
    if not isinstance(tokens, Tokens):
        tokens = Tokens.of([tokens] if isinstance(tokens, str) else tokens)
    public = {
        '/livez': LiveResource(),
        '/readyz': ReadyResource(store),
        **_documents(max_body_bytes),
    }
    middleware: list[Any] = [RequestLog()]
    routes: dict[str, object] = {'/plants': PlantsResource(store, max_body_bytes)}
    if metrics:
        routes['/metrics'] = measured = Metrics(store)
        middleware.append(measured)
    if cors_origins:
        middleware.append(CrossOrigin(cors_origins))
    middleware += [AnnouncedClose(), BearerAuth(tokens, public), StrictRouting()]
    app = falcon.App(request_type=PlantsRequest, middleware=middleware)
    for path, resource in (routes | public).items():
        app.add_route(path, resource)
    app.add_error_handler(Exception, _answer_exception)
    app.add_error_handler(StoreError, _answer_store_error)
    app.add_error_handler(falcon.HTTPError, _answer_http_error)
    app.add_error_handler(Fault, _answer_fault)
    return app


def get_app(
    environ: Mapping[str, str] = os.environ,
) -> falcon.App[PlantsRequest, Response]:
    """Build the application that the environment describes.

    The store is closed when the process ends. With no token configured a random one is
    made and printed: the service never runs open.

    A process that opens the store for many (``gunicorn.conf.py``) sets ``STORE_EXISTS``
    for them, and then a store that is missing is not made.

    Raises:
        ValueError: A variable has a bad value.
    """
    settings = Settings.from_environ(environ)
    tokens = settings.tokens
    if tokens is None:
        token = secrets.token_urlsafe()
        tokens = Tokens.of([token])
        print(new_token_notice(token, 'http://HOST:PORT'), file=sys.stderr, flush=True)
    create: Create = 'never' if STORE_EXISTS in environ else 'first'
    store = open_store(settings.store, create=create)
    atexit.register(store.close)
    return create_app(
        store,
        tokens=tokens,
        max_body_bytes=settings.max_body_bytes,
        metrics=settings.metrics,
        cors_origins=settings.cors_origins,
    )


def new_token_notice(token: str, address: str) -> str:
    """Return what to print for a token that was made because none was configured."""
    return (
        f'No token is configured (PLANTS_TOKENS), so this one was made:\n\n'
        f'    {token}\n\n'
        f'Add a plant with it:\n\n'
        f"    curl {address}/plants -H 'Authorization: Bearer {token}' "
        f'-H \'Content-Type: application/json\' -d \'{{"id": 1, "name": "Fern"}}\'\n'
    )


def __getattr__(name: str) -> falcon.App[PlantsRequest, Response]:
    """Make ``app:app`` when a server looks for it, and not before."""
    if name != 'app':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    # Not covered: tests look for it in interpreters of their own.
    application = globals()['app'] = get_app()  # pragma: no cover
    return application  # pragma: no cover


if __name__ == '__main__':  # pragma: no cover - it becomes gunicorn
    here = Path(__file__).resolve().parent
    command = [sys.executable, '-m', 'gunicorn', '--pythonpath', str(here)]
    command += ['-c', str(here / 'gunicorn.conf.py'), *sys.argv[1:]]
    os.execv(sys.executable, command)
