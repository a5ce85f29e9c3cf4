"""Models are compared with references and with themselves, within rounding."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(compile_quickly):
    pass
