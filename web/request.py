"""A request, with what the middleware finds out about it."""

import time
from typing import Any

import falcon


class PlantsRequest(falcon.Request):
    """A request of this service; the attributes are for the log."""

    id = '-'
    token_name = '-'  # of the accepted token, for the log
    error = 0  # the ErrorValue of the answer, or 0

    def __init__(
        self, env: dict[str, Any], options: falcon.RequestOptions | None = None
    ) -> None:
        self.began = time.perf_counter()
        env.setdefault('PATH_INFO', '')  # PEP 3333: it may be absent when it is empty
        super().__init__(env, options)
        if self.method == 'WEBSOCKET':
            # Falcon answers 400 to this method before any middleware runs, so without a
            # request id and a check of the token. In lower case it is just unknown.
            self.method = 'websocket'
