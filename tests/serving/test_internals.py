"""The installed gunicorn is the version whose internals were checked."""

from importlib import metadata

from serving import internals


def test_version_of_gunicorn_is_the_one_that_was_checked():
    """For another version, review each use of an internal: all are in one module."""
    assert metadata.version('gunicorn') == internals.CHECKED_VERSION, (
        'gunicorn has another version: read serving/internals.py, see whether what it '
        'touches is as it was, and then change CHECKED_VERSION'
    )
