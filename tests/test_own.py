"""What user code raised is told with its place."""

from pathlib import Path

import pytest

import marl_jax
from marl_jax.own import error_line

LIBRARY = Path(marl_jax.__file__).parent


@pytest.mark.parametrize(
    ("file", "place"),
    [(f"{LIBRARY}_of_mine/reward.py", " (in reward, line 1)"), (f"{LIBRARY}/table.py", " (in test_")],
)
def test_a_place_in_the_library_is_passed_over_and_one_in_a_folder_whose_name_begins_alike_is_told(
    file, place
):
    space = {}
    exec(compile("def reward(): raise KeyError('x')", file, "exec"), space)
    with pytest.raises(KeyError) as raised:
        space["reward"]()
    assert error_line(raised.value).startswith("KeyError: 'x'" + place)
