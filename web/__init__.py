"""What a request meets on its way through the service, and what configures that."""

from store import __version__

VERSION = __version__
