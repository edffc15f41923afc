"""The contract suite, by the name that tests import it by."""

from store.testing import *  # noqa: F403
