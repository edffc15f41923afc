"""The plant store over HTTP: a WSGI application.

    POST /plants        200, 400, 401, 500, 503    add a plant
    GET  /livez         200                        the process answers
    GET  /readyz        200, 500, 503              a plant can be stored now
    GET  /openapi.json  200                        the OpenAPI description
    GET  /docs          200, 404                   a page to try the service
    GET  /metrics       200, 401                   for Prometheus, if switched on

HEAD works where GET does. An unknown path or method is refused: 401, 404 or 405. An
answer of 400 or more is an ``Error``: ``schemas/Error.json``, ``web/errors.py``.

``create_app`` is for programs that embed the service. ``app:app`` is for servers: the
application that the environment configures (``web/settings.py``).
"""

import atexit
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import falcon
from falcon import Response

from store import Plant, PlantStore, open_store
from web import errors
from web.body import Schema, encode, load_schemas, read_plant
from web.documents import ReadOnlyResource, document_resources
from web.middleware import BearerAuth, CrossOrigin, RequestLog, StrictRouting
from web.request import PlantsRequest
from web.settings import DEFAULT_MAX_BODY_BYTES, Settings
from web.tokens import Tokens, make_token, show_token


class PlantsApp(falcon.App):  # type: ignore[type-arg]  # agents replace the class
    """The WSGI application. It also answers the requests that a server refuses."""

    max_body_bytes = DEFAULT_MAX_BODY_BYTES

    def __init__(self, middleware: list[Any]) -> None:
        super().__init__(request_type=PlantsRequest, middleware=middleware)
        self.add_error_handler(Exception, errors.answer)
        self.add_error_handler(falcon.HTTPError, errors.answer)  # Falcon has its own


class PlantsResource:
    """``/plants``; the body of a request has at most ``max_body_bytes``."""

    def __init__(self, store: PlantStore, schema: Schema, max_body_bytes: int) -> None:
        self._store = store
        self._schema = schema
        self._max_body_bytes = max_body_bytes

    def on_post(self, req: PlantsRequest, resp: Response) -> None:
        """Add a plant; respond with the plant without its id."""
        plant = read_plant(req, self._schema, self._max_body_bytes)
        self._store.add(plant)
        members = zip(Plant._fields[1:], plant[1:], strict=True)
        resp.data = encode({name: text for name, text in members if text is not None})


def create_app(
    store: PlantStore,
    *,
    tokens: Tokens | Mapping[str, str] | Iterable[str],
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    metrics_token: str | None = None,
    cors_origins: Iterable[str] = (),
) -> PlantsApp:
    """Build the WSGI application.

    Args:
        store: Where the plants go; the caller closes it.
        tokens: The accepted tokens: one, several, a mapping from names to tokens, or a
            ``Tokens``. ``sha256:`` and a digest stand for the token with that digest.
        max_body_bytes: The longest body that is read.
        metrics_token: Serves ``/metrics``, to this token alone; needs the package
            ``prometheus_client``.
        cors_origins: Origins whose pages may read answers; ``*`` stands for all.

    Raises:
        TypeError: ``store`` is not a ``PlantStore``: it is a URL, for example.
        ValueError: There is no token, a token cannot be sent in a header, one is for
            plants and metrics, no browser sends such an origin, or a schema is wrong.
    """
    if not isinstance(store, PlantStore):
        # Do not show the value: a URL may have a password in it.
        kind = type(store).__name__
        raise TypeError(f'the store is a {kind}, not a PlantStore: use open_store(URL)')
    accepted = {'': tokens if isinstance(tokens, Tokens) else Tokens(tokens)}
    files = load_schemas()  # read once: description and rules must agree
    plants = PlantsResource(store, Schema('NewPlant', files), max_body_bytes)

    def ready() -> bytes:
        store.ping()
        return encode({'status': 'ready'})

    public = {
        '/livez': ReadOnlyResource(lambda: encode({'status': 'live'})),
        '/readyz': ReadOnlyResource(ready),
        **document_resources(files, max_body_bytes, metrics=bool(metrics_token)),
    }
    routes: dict[str, object] = {'/plants': plants, **public}
    # Requests pass through these in this order, responses in reverse order.
    middleware: list[Any] = [RequestLog()]
    if metrics_token:
        from web.metrics import Metrics  # its package is optional

        accepted[''].refuse(metrics_token)
        accepted['/metrics'] = Tokens({'metrics': metrics_token})
        routes['/metrics'] = measure = Metrics(store, accepted[''])
        middleware.insert(0, measure)
    if cors_origins:
        middleware.append(CrossOrigin(cors_origins))
    app = PlantsApp([*middleware, BearerAuth(accepted, public), StrictRouting()])
    app.max_body_bytes = max_body_bytes
    for path, resource in routes.items():
        app.add_route(path, resource)
    return app


def get_app(environ: Mapping[str, str] = os.environ) -> PlantsApp:
    """Build the application that the environment configures.

    The store is closed when the process ends. If no token is configured, one is made
    and printed: the service never runs open.
    """
    settings = Settings.from_environ(environ)
    store = open_store(settings.store)
    atexit.register(store.close)
    tokens = settings.tokens
    if tokens is None:
        tokens = Tokens(token := make_token())
        show_token(token, 'http://HOST:PORT')
    return create_app(store, tokens=tokens, **settings.app_options())


def __getattr__(name: str) -> PlantsApp:
    """Make ``app:app`` at the first access, so that an import has no side effect."""
    if name != 'app':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    application = globals()['app'] = get_app()
    return application


if __name__ == '__main__':
    configuration = Path(__file__).with_name('gunicorn.conf.py')
    command = [sys.executable, '-m', 'gunicorn', '-c', str(configuration)]
    os.execv(sys.executable, command + sys.argv[1:])
