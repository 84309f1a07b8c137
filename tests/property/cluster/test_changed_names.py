"""The logs of all primaries name everything by which two listings of a mesh differ, or nothing is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshd.core.peer_messages import ChangesResponse
from meshd.peer_reads.changed_names import merge_changes

NODES = 3
KEYS = st.integers(0, 30).map(lambda number: f"k{number:02}")
COMMITS = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.lists(st.tuples(KEYS, st.integers(0, 2)), min_size=1, max_size=6))
)


def primary_of(key: str) -> int:
    return int(key[1:]) % NODES


class Model:
    """Nodes with a store and a log each; a commit with many names is logged as a range of them."""

    def __init__(self) -> None:
        self.stores: list[dict[str, int]] = [{} for _ in range(NODES)]
        self.logs: list[list[list[str]]] = [[] for _ in range(NODES)]

    def commit(self, node: int, changes: list[tuple[str, int]]) -> None:
        """Put (or with 0 delete) names on a node, whether or not it is their primary."""
        for key, content in changes:
            if content:
                self.stores[node][key] = content
            else:
                self.stores[node].pop(key, None)
        self.logs[node].append([key for key, _ in changes])

    def listing(self) -> dict[str, int]:
        return {
            key: content
            for node, store in enumerate(self.stores)
            for key, content in store.items()
            if primary_of(key) == node
        }

    def answer(self, node: int, since: int, *, forgotten: bool) -> ChangesResponse:
        log = self.logs[node]
        keys, ranges = set[str](), list[tuple[str, str]]()
        for names in log[since:]:
            if len(names) > 3:
                ranges.append((min(names), max(names)))
            else:
                keys.update(names)
        return ChangesResponse(len(log), not forgotten, sorted(keys), ranges)


@given(COMMITS, COMMITS, st.sampled_from([None, *range(NODES)]))
def test_no_difference_is_left_out(
    before: list[tuple[int, list[tuple[str, int]]]],
    after: list[tuple[int, list[tuple[str, int]]]],
    forgetful: int | None,
) -> None:
    mesh = Model()
    for commit in before:
        mesh.commit(*commit)
    seen = [len(log) for log in mesh.logs]
    earlier = mesh.listing()
    for commit in after:
        mesh.commit(*commit)
    now = mesh.listing()
    answers = [mesh.answer(node, seen[node], forgotten=node == forgetful) for node in range(NODES)]
    changes = merge_changes(answers)
    if forgetful is not None:
        assert changes is None
        return
    assert changes is not None
    different = {key for key in {*earlier, *now} if earlier.get(key) != now.get(key)}
    for key in different:
        assert key in changes.keys or any(first <= key <= last for first, last in changes.ranges)
    if not after:
        assert not changes.keys
        assert not changes.ranges
