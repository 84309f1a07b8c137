"""Which of several wheels a node uses."""

from __future__ import annotations

import sys

import pytest
from packaging import tags

from meshd.transform.sandbox.wheel_tags import WrongWheelError, choose_wheels

HERE = str(next(iter(tags.sys_tags())))
PLATFORM = HERE.rpartition("-")[2]
OTHER = "tiny-1.0-cp39-cp39-win_amd64.whl"


def test_the_most_specific_wheel_of_a_library_is_used() -> None:
    exact, stable, pure = (
        f"tiny-1.0-{HERE}.whl",
        f"tiny-1.0-cp38-abi3-{PLATFORM}.whl",
        "tiny-1.0-py3-none-any.whl",
    )
    assert choose_wheels([pure, stable, exact, OTHER]) == [exact]
    assert choose_wheels([pure, stable, OTHER]) == [stable]
    assert choose_wheels([OTHER, pure]) == [pure]


def test_libraries_are_chosen_by_themselves_and_names_in_their_order() -> None:
    names = ["b_c-1-py3-none-any.whl", OTHER, f"tiny-1.0-{HERE}.whl", "a-2.0-py2.py3-none-any.whl"]
    assert choose_wheels(names) == [names[0], names[2], names[3]]
    assert choose_wheels([]) == []


def test_wheels_for_other_nodes_alone_are_refused_with_what_this_node_has() -> None:
    newer = f"tiny-1.0-cp3{sys.version_info.minor + 1}-cp3{sys.version_info.minor + 1}-{PLATFORM}.whl"
    with pytest.raises(WrongWheelError) as caught:
        choose_wheels([OTHER, newer, "b-1-py3-none-any.whl"])
    assert OTHER in str(caught.value)
    assert newer in str(caught.value)
    assert HERE in str(caught.value)
