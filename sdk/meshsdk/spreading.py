"""Gather from the nodes of a mesh: each item is asked of a node that holds it, all of them at once.

Law: answers come in the order of the items. Whom an item is asked of is advice: a node that does not hold it
fetches it, and one that is gone is passed over. Invariant: so many items at most are taken ahead.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

T = TypeVar("T")
A = TypeVar("A")
AHEAD: Final = 16384
"""Items taken beyond the one that is answered."""
_FIRST: Final = 4096
"""Items looked at before the first nodes are asked."""


def spread(
    source: Iterator[T],
    whose: Callable[[T], str],
    ask: Callable[[str, Iterator[T]], Generator[A, None, None]],
) -> Generator[A, None, None]:
    """The answers. `whose` names the node of an item; `ask` answers items of one node, in their order, and
    ends when it is given no more."""
    shares, answers = _Shares(source, whose), dict[str, "Generator[A, None, None]"]()
    try:
        while len(shares.order) < _FIRST and shares.pull():
            pass
        for node in list(shares.queues):
            answers[node] = ask(node, _Share(shares, node))
        while shares.order or shares.pull():
            node = shares.order.popleft()
            flow = answers.get(node)
            answer = None if flow is None else next(flow, None)
            if answer is None:  # it had answered all there was for it
                flow = answers[node] = ask(node, _Share(shares, node))
                answer = next(flow)
            yield answer
    finally:
        for flow in answers.values():
            flow.close()


class _Shares(Generic[T]):
    """The items of a source by node. `order`: whose turn it is, item by item."""

    def __init__(self, source: Iterator[T], whose: Callable[[T], str]) -> None:
        self._source, self._whose, self._done = source, whose, False
        self.order: deque[str] = deque()
        self.queues: dict[str, deque[T]] = defaultdict(deque)

    def pull(self) -> bool:
        """Take one more item from the source; False at its end, or when there are enough."""
        if self._done or len(self.order) >= AHEAD:
            return False
        try:
            item = next(self._source)
        except StopIteration:
            self._done = True
            return False
        node = self._whose(item)
        self.order.append(node)
        self.queues[node].append(item)
        return True


class _Share(Generic[T]):
    """The items of one node; it may go on after it has ended, when more were taken."""

    def __init__(self, shares: _Shares[T], node: str) -> None:
        self._shares, self._queue = shares, shares.queues[node]

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._queue:
            if not self._shares.pull():
                raise StopIteration
        return self._queue.popleft()
