"""All that is under a prefix of etcd, as a process knows it, and what it makes of reading it anew.

Invariant: a copy is what the prefix was at one revision of one history. Where etcd is put back from a backup
another history begins, whose revisions are those of the old one once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.interface import Versioned


class Copy(NamedTuple):
    """All keys under the prefix at `revision`, in order; `topics`: the revision of each one's newest change.
    `restores`: how many histories there were before this one.
    """

    entries: Mapping[str, Versioned]
    topics: Mapping[str, int]
    revision: int
    restores: int = 0

    def reread(self, entries: Mapping[str, Versioned], revision: int) -> Copy:
        """The copy after this one, where `entries` are all there are at `revision`."""
        topics = dict(self.topics)
        for key, entry in entries.items():
            topic = topic_of(key)
            topics[topic] = max(topics.get(topic, 0), entry.version)
        for key in self.entries.keys() - entries.keys():  # went at some revision up to this one
            topics[topic_of(key)] = revision
        restores = self.restores
        if not self._came_before(entries, revision):  # anything may be otherwise, and nothing shows what
            restores, topics = restores + 1, dict.fromkeys(topics, revision)
        return Copy(dict(sorted(entries.items())), topics, revision, restores)

    def _came_before(self, entries: Mapping[str, Versioned], revision: int) -> bool:
        """Whether this was a state of the history that has `entries` at `revision`: what is no younger than
        this copy is in it."""
        return self.revision <= revision and all(
            entry.version > self.revision or self.entries.get(key) == entry for key, entry in entries.items()
        )


def topic_of(key: str) -> str:
    """What comes before the first slash."""
    return key.partition("/")[0]
