"""The plant store over HTTP: a WSGI application.

    POST /plants        200, 400, 401, 500, 503    add a plant
    GET  /livez         200                        the process answers
    GET  /readyz        200, 500, 503              a plant can be stored now
    GET  /openapi.json  200                        the OpenAPI description
    GET  /docs          200, 404                   a page to try the service
    GET  /metrics       200, 401                   for Prometheus, if switched on

HEAD works where GET does. An unknown path or method is refused: 401, 404 or 405. An
answer of 400 or more is an ``Error``: ``schemas/Error.json``, ``web/errors.py``.

``create_app`` is for programs that embed the service, ``app:app`` for servers.
"""

import atexit
import os
from collections.abc import Iterable, Mapping
from typing import Any

import falcon

from store import PlantStore, open_store
from store.base import TEXTS, to_json
from web import errors, middleware
from web.body import PlantReader
from web.documents import ReadOnlyResource, documents
from web.middleware import PlantsRequest
from web.settings import Settings
from web.tokens import MADE_TOKEN, Tokens, show_token


class PlantsApp(falcon.App):  # type: ignore[type-arg]  # agents replace the class
    """The WSGI application. It also answers the requests that a server refuses."""

    max_body_bytes: int  # a server need not read longer ones
    settings: Settings  # this and what follows is set by a server, for its own use
    store: PlantStore
    tls: Any
    metrics: Any = None  # web.metrics.Metrics, whose package is optional


class PlantsResource:
    """``/plants``."""

    def __init__(self, store: PlantStore, reader: PlantReader) -> None:
        self._store, self._reader = store, reader

    def on_post(self, req: PlantsRequest, resp: falcon.Response) -> None:
        """Add a plant; respond with the plant without its id."""
        plant = self._reader.read(req)
        self._store.add(plant)
        members = zip(TEXTS, plant[1:])
        answer = {name: text for name, text in members if text is not None}
        resp.data = to_json(answer).encode()


def create_app(
    store: PlantStore,
    *,
    tokens: Tokens | Mapping[str, str] | Iterable[str],
    max_body_bytes: int = Settings.max_body_bytes,
    metrics_token: str | None = None,
    cors_origins: Iterable[str] = (),
) -> PlantsApp:
    """Build the WSGI application; an error says which argument is wrong.

    Args:
        store: Where the plants go; the caller closes it.
        tokens: One, several, a mapping from names to tokens, or a ``Tokens``; for each
            ``sha256:`` and its digest may stand.
        max_body_bytes: The longest body that is read.
        metrics_token: Switches ``/metrics`` on, for this token alone.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.
    """
    if not isinstance(store, PlantStore):  # not shown: a URL may have a password
        raise TypeError(f'{type(store).__name__} is no PlantStore: use open_store(URL)')
    tokens = tokens if isinstance(tokens, Tokens) else Tokens(tokens)
    reader = PlantReader(max_body_bytes)

    def ready() -> bytes:
        tokens.find('')  # an add is refused where no token can be checked
        store.ping()
        return b'{"status": "ready"}'

    public = documents(reader.files, metrics=bool(metrics_token))
    public['/livez'] = ReadOnlyResource(lambda: b'{"status": "live"}')
    public['/readyz'] = ReadOnlyResource(ready)
    own: dict[str, Tokens | None] = dict.fromkeys(public)
    app = PlantsApp(request_type=PlantsRequest)
    app.max_body_bytes = max_body_bytes
    app.add_error_handler((Exception, falcon.HTTPError), errors.answer)
    # Requests pass through these in this order, responses in reverse order.
    app.add_middleware(middleware.RequestLog())
    if cors_origins:
        app.add_middleware(middleware.CrossOrigin(cors_origins))
    app.add_middleware(middleware.Gate(tokens, own))
    app.add_route('/plants', PlantsResource(store, reader))
    for path, resource in public.items():
        app.add_route(path, resource)
    if metrics_token:
        from web.metrics import Metrics  # its package is optional

        tokens.refuse(metrics_token)
        own['/metrics'] = Tokens({'metrics': metrics_token})
        app.metrics = Metrics(store, tokens, ready)
        app.add_route('/metrics', app.metrics)
        app.add_middleware(app.metrics)
    return app


def get_app(environ: Mapping[str, str] = os.environ) -> PlantsApp:
    """Build the application of the environment, with a new token if it names none."""
    settings = Settings.from_environ(environ)
    store = open_store(settings.store)
    atexit.register(store.close)
    if not settings.tokens:
        show_token('http://HOST:PORT')
    ours = {'store': store, 'tokens': settings.tokens or MADE_TOKEN}
    return create_app(**vars(settings) | ours)


def __getattr__(name: str) -> PlantsApp:
    """Make ``app:app`` at the first access, so that an import has no side effect."""
    if name != 'app':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    application = globals()['app'] = get_app()
    return application
