"""What stands between a client and a server, and lets them down."""

import select
import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards what is sent to its port, until it is told otherwise.

    Args:
        port: Where to, at 127.0.0.1.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, port):
        self._target = port
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.port = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._ended = False
        self._cuts = 0  # how many connections to close
        self._answers = None  # how many to let pass before it stops
        self._threads = []

    def __enter__(self):
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info):
        self._ended = True
        self._flows.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def stop(self, after=None):
        """Forward nothing more, as a network does that drops every packet.

        Args:
            after: This many answers still pass; at once by default.
        """
        self._answers = after
        if after is None:
            self._flows.clear()

    def go_on(self):
        """Forward what waits, and what comes."""
        self._answers = None
        self._flows.set()

    def cut(self, times=1):
        """Close the connections that bring the next answers, and lose the answers."""
        self._cuts = times

    def _start(self, function, *arguments):
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        while not self._ended:
            if select.select([self._listener], [], [], 0.02)[0]:
                client, _ = self._listener.accept()
                self._start(self._serve, client)

    def _serve(self, client):
        self._flows.wait()
        target = ('127.0.0.1', self._target)
        with client, suppress(OSError), socket.create_connection(target) as server:
            other = {client: server, server: client}
            while not self._ended:
                for source in select.select([client, server], [], [], 0.02)[0]:
                    self._flows.wait()
                    data = source.recv(65_536)
                    if not data or (source is server and self._loses()):
                        return
                    other[source].sendall(data)

    def _loses(self):
        """Whether this answer is lost, and the connection with it."""
        if self._answers is not None:
            self._answers -= 1
            if self._answers < 0:
                self._flows.clear()
                self._flows.wait()
        lost = self._cuts > 0
        self._cuts -= lost
        return lost
