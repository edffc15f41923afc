"""The request, with what the service notes of it."""

from __future__ import annotations

from typing import Any

import falcon


class Context:
    """What the middleware notes of a request while it is served.

    Attributes:
        id: The request id.
        token_name: Name of the accepted token, for the log.
        error: The ``error`` of the answer, or 0.
        began: ``time.perf_counter`` when the head was read.
    """

    id = '-'
    token_name: str | None = None
    error = 0
    began = 0.0


class PlantsRequest(falcon.Request):
    """A request with our context."""

    context_type = Context
    context: Context  # type: ignore[assignment]

    def __init__(
        self, env: dict[str, Any], options: falcon.RequestOptions | None = None
    ) -> None:
        env.setdefault('PATH_INFO', '')  # PEP 3333: it may be absent when it is empty
        super().__init__(env, options)
        if self.method == 'WEBSOCKET':
            # Falcon answers 400 to this name before any middleware runs: no request id,
            # no check of the token. In lower case it is one more unknown method.
            self.method = 'websocket'
