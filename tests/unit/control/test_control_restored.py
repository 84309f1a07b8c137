"""A control store that was put back from a backup and went on as far as before: versions are those that were
seen, what they stand for is not."""

from __future__ import annotations

import asyncio

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import Versioned
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl


class Word(msgspec.Struct, frozen=True):
    text: str


class Restorable(MemoryControl):
    """A store that can be put back."""

    def put_back(self, key: str, value: bytes | None) -> None:
        """The key has another value at the version it had, or is gone; nothing else tells."""
        if value is None:
            del self._entries[key]
        else:
            self._entries[key] = Versioned(value, self._entries[key].version)
        self.restores += 1


def test_documents_are_read_again() -> None:
    control = Restorable(ManualClock())
    words = CachedTopic(control, "words", msgspec.json.Decoder(Word).decode)
    asyncio.run(words.put("one", Word("before")))
    asyncio.run(words.put("two", Word("since")))
    assert words.current() == {"one": Word("before"), "two": Word("since")}
    control.put_back("words/two", None)
    assert words.current() == {"one": Word("before")}
    control.put_back("words/one", msgspec.json.encode(Word("after")))
    assert words.current() == {"one": Word("after")}
    assert words.version("two") == 0


def test_a_newer_map_is_taken() -> None:
    control = Restorable(ManualClock())
    maps = ClusterMapStore(control)
    first = asyncio.run(maps.update_map(lambda _: turn.bootstrap_map(Node("n1", "http://10.0.0.1:9000"))))
    grown = turn.join_node(first, Node("n2", "http://10.0.0.2:9000"))
    control.put_back("cluster/map", grown.to_json())
    assert maps.current() == grown
    control.put_back("cluster/map", first.to_json())
    assert maps.current() == grown, "nobody goes back behind what was seen"
