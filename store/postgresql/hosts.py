"""Connects to the first host of a URL that takes plants, within a deadline."""

import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import psycopg
from psycopg._conninfo_utils import get_param, split_attempts
from psycopg.conninfo import timeout_from_conninfo

from store.postgresql.connection import Connection
from store.postgresql.reasons import Fault, explain

RESOLVE_WITHIN = 2  # seconds

Lookup = tuple[Future[list[dict[str, str]]], float]  # addresses, until when to wait


class Hosts:
    """The hosts of a URL, and the lookups of their names."""

    def __init__(self, parameters: dict[str, Any], url: str) -> None:
        self._parameters = parameters
        self._url = url
        self._lookups: dict[str, Lookup] = {}

    def connect(self, deadline: float, *, to_read: bool) -> Connection:
        """Return a connection to the first host that takes plants, or can be read.

        Raises:
            psycopg.Error: No host does. If there are several, the words name each.
        """
        hosts = split_attempts(self._parameters)
        lookups = [self._look_up(host) for host in hosts]  # all at once
        left = (deadline - time.monotonic()) / len(hosts)
        longest = timeout_from_conninfo(self._parameters)
        words = []
        for host, (lookup, until) in zip(hosts, lookups, strict=True):
            error: psycopg.Error
            try:
                addresses = lookup.result(max(0, until - time.monotonic()))
                within = min(longest, left / len(addresses))
                for address in addresses:
                    try:
                        return Connection.open(
                            host | address, within, deadline, to_read
                        )
                    except psycopg.OperationalError as ex:
                        error = ex
            except TimeoutError:
                error = Fault('08', f'the name did not resolve in {RESOLVE_WITHIN} s')
            except (OSError, UnicodeError) as ex:
                error = Fault('08', f'the name does not resolve: {ex}')
            if len(hosts) == 1:
                raise error
            name = get_param(host, 'host') or get_param(host, 'hostaddr')
            place = f'{name}:{get_param(host, "port") or 5432}'
            words.append(f'{place}: {explain(error, url=self._url).detail}')
        raise Fault('hosts', '; '.join(words))

    def _look_up(self, host: Any) -> Lookup:
        """Resolve a name in a thread that may be left behind: it has no time limit."""
        name = str(get_param(host, 'host') or '')
        found, until = self._lookups.get(name, (None, 0.0))
        if found is None or found.done():  # one that hangs is not repeated
            found, until = Future(), time.monotonic() + RESOLVE_WITHIN
            if not name or name[0] in '/@' or get_param(host, 'hostaddr'):
                found.set_result([{}])  # a Unix socket, or an address
            else:
                threading.Thread(
                    target=_resolve, args=(name, found), daemon=True
                ).start()
            self._lookups[name] = found, until  # not if there was no thread
        return found, until


def _resolve(name: str, found: Future[list[dict[str, str]]]) -> None:
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found.set_result([{'hostaddr': str(address[0])} for *_, address in addresses])
    except (OSError, UnicodeError) as ex:
        found.set_exception(ex)
