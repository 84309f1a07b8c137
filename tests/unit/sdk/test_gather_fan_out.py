"""Items asked of several nodes come back in their order, whatever the nodes' shares are."""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from meshsdk.client import gather
from meshsdk.client.gather import fan_out

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


class Nodes:
    """Answers in frames of a few items, and asks for the next frame before it gives the one at hand."""

    def __init__(self, frame: int) -> None:
        self.frame, self.asked = frame, list[str]()

    def ask(self, node: str, items: Iterator[int]) -> Generator[tuple[str, int], None, None]:
        self.asked.append(node)
        held = list(islice(items, self.frame))

        def answers(held: list[int]) -> Generator[tuple[str, int], None, None]:
            while held:
                following = list(islice(items, self.frame))
                yield from ((node, item) for item in held)
                held = following

        return answers(held)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=200), st.integers(1, 9), st.integers(1, 50), st.integers(1, 20))
def test_answers_come_in_the_order_of_the_items(
    owners: list[int], frame: int, ahead: int, first: int
) -> None:
    before = gather.AHEAD, gather._FIRST
    gather.AHEAD, gather._FIRST = ahead, first  # type: ignore[misc]  # small ones show more
    try:
        found = list(fan_out(iter(range(len(owners))), lambda item: str(owners[item]), Nodes(frame).ask))
    finally:
        gather.AHEAD, gather._FIRST = before  # type: ignore[misc]
    assert found == [(str(owner), item) for item, owner in enumerate(owners)]


def test_no_more_is_taken_than_a_part_of_an_endless_source() -> None:
    taken = []

    def endless() -> Iterator[int]:
        for item in count():
            taken.append(item)
            yield item

    flow = fan_out(endless(), lambda item: str(item % 2), Nodes(8).ask)
    assert [item for _, item in islice(flow, 5)] == [0, 1, 2, 3, 4]
    assert len(taken) <= gather.AHEAD + 5
    flow.close()
