"""A TCP proxy that can stall, or drop answers, between a client and a server."""

import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


class Proxy:
    def __init__(self, port):
        self._target = port
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.port = self._listener.getsockname()[1]
        self._forwarding = threading.Event()
        self._ended = False
        self._answers_left = -2  # to forward before one is dropped; never, if negative
        self._threads = ThreadPoolExecutor(100)
        # A network that drops packets, and forwards again, what waits first.
        self.stop, self.go_on = self._forwarding.clear, self._forwarding.set

    def __enter__(self):
        self.go_on()
        self._threads.submit(self._accept)
        return self

    def __exit__(self, *exc_info):
        self._ended = True
        self.go_on()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()
        self._listener.close()

    def url(self, url):
        """Return the URL of a server as it is behind this proxy."""
        return url.replace(f':{self._target}/', f':{self.port}/')

    def cut(self, after):
        """Forward some more answers; drop the next one, and close its connection."""
        self._answers_left = after

    def _accept(self):
        with suppress(OSError):  # until it is shut down
            while True:
                self._threads.submit(self._serve, self._listener.accept()[0])

    def _serve(self, client):
        self._forwarding.wait()
        target = ('127.0.0.1', self._target)
        with client, suppress(OSError), socket.create_connection(target) as server:
            other = {client: server, server: client}
            while not self._ended:
                for source in select.select([client, server], [], [], 0.02)[0]:
                    self._forwarding.wait()
                    data = source.recv(65_536)
                    if source is server:
                        self._answers_left -= 1
                    if not data or (source is server and self._answers_left == -1):
                        return
                    other[source].sendall(data)
