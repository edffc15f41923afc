"""The wheels of requirements.txt, for tests that install them without a network."""

import os
from pathlib import Path

import pytest


def wheels():
    """Return the paths of the wheels, or skip the test if there are none."""
    if 'WHEELS' not in os.environ:
        pytest.skip('it needs the wheels of requirements.txt: see .ci/run')
    return sorted(Path(os.environ['WHEELS']).iterdir())


def offline_pip():
    """Return the environment variables that make pip use only the wheels."""
    assert wheels()
    return {
        'PIP_CONFIG_FILE': os.devnull,
        'PIP_FIND_LINKS': os.environ['WHEELS'],
        'PIP_NO_COMPILE': '1',
        'PIP_NO_INDEX': '1',
    }
