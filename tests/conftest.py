"""Fixtures that several test files share."""

import pytest


@pytest.fixture
def bitsandbytes_off():
    """The switch for bitsandbytes is off and its counters are at zero, before the test and after it."""
    from halfbyte.integrations import bitsandbytes as switch

    switch.disable()
    switch.reset_counters()
    yield
    switch.disable()
