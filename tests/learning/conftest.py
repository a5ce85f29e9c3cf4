"""Learning is compared with plain references, exactly in any order of operations."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(compile_quickly):
    pass
