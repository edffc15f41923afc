"""The tests that every store of plants must pass, for the authors of stores.

To test a store of your own, write a subclass of ``StoreContract``: see
``docs/example_store/test_plants_in_sqlite.py``. Its fixture ``store`` makes an empty
store that was not used yet. A store that has a ``url`` is opened again by
``open_store``, also in other processes: so its package must be installed.

The docstring of a test is the promise that it checks; pytest shows it with a failure.
"""

import pytest

# Before the import: pytest then shows the values in an assertion that fails.
pytest.register_assert_rewrite('store.testing.contract', 'store.testing.waiting')

from store.testing.contract import StoreContract  # noqa: E402

__all__ = ['StoreContract']
