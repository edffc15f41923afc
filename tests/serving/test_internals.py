"""The internals of gunicorn that are touched, in the version they were checked with."""

from importlib import metadata

from serving import internals


def test_version_of_gunicorn_is_the_one_that_was_checked():
    """Another version needs a look at each touch of an internal, all in one module."""
    assert metadata.version('gunicorn') == internals.CHECKED_VERSION, (
        'gunicorn has another version: read serving/internals.py, see whether what it '
        'touches is as it was, and then change CHECKED_VERSION'
    )
