"""Learning is compared with plain references, exactly in any order of operations."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
    if request.module.__name__ != "test_learning_proof":  # whose long version is a measurement
        request.getfixturevalue("compile_quickly")
