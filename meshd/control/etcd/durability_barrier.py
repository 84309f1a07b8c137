"""A barrier for etcd versions that, as the only member, answer a change before their own log is synced.

Such an etcd applies the entries of a batch while it still saves them, and shows and acknowledges them at
once; but it begins the next batch only after that save. A linearizable read takes part in a later batch, so
one that begins after an answer ends after everything that the answer shows is on disk.

Law: the answers of both calls must have the same raft term. An only member that has restarted has another
one, and may have forgotten what it had shown before.

Source: issue 14370 of etcd, "Durability API guarantee broken in single node cluster".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from meshd.control.etcd.gateway import EtcdAmbiguousError, EtcdError, encoded, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.etcd.gateway import Gateway

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_MENDED: Final = ((3, 4, 21), (3, 5, 5))


def may_answer_early(version: str) -> bool:
    """Whether etcd of this version, if it is the only member, may answer a change before its log is synced.
    False for a version that cannot be parsed."""
    found = _VERSION.match(version)
    if found is None:
        return False
    release = tuple(map(int, found.groups()))
    return release < _MENDED[0] or (3, 5, 0) <= release < _MENDED[1]


class DurabilityBarrier:
    """The barrier of one gateway; `key` is one that may be read. It costs a read where the version of etcd
    needs it, however many members there are, since their number may change unnoticed; else nothing."""

    def __init__(self, gateway: Gateway, key: bytes) -> None:
        self._gateway, self._key = gateway, encoded(key)
        self._needed = True

    def forget_version(self) -> None:
        """Assume the worst until the version is known: another etcd may answer now."""
        self._needed = True

    def learn_version(self) -> None:
        """Ask for the version; without an answer, the barrier stays."""
        try:
            answer = self._gateway.call("maintenance/status", {}, repeatable=True)
        except EtcdError:
            return
        self._needed = may_answer_early(str(answer.get("version", "")))

    def is_kept(self, answer: Mapping[str, Any]) -> bool:
        """Wait until everything that an answer shows is on disk. False if etcd has restarted since, or has
        another leader: it may have forgotten that. Raises EtcdError."""
        if not self._needed:
            return True
        wanted = {"key": self._key, "count_only": True}
        return _term(self._gateway.call("kv/range", wanted, repeatable=True)) == _term(answer)

    def await_change(self, answer: Mapping[str, Any]) -> None:
        """Wait until the change that this answer acknowledges is on disk. Raises EtcdAmbiguousError if that
        cannot be known."""
        try:
            if self.is_kept(answer):
                return
            why = "it has restarted or has another leader"
        except EtcdError as error:
            why = str(error)
        raise EtcdAmbiguousError(
            f"etcd did not confirm that a change is on disk ({why}); check the state before repeating it"
        )


def _term(answer: Mapping[str, Any]) -> int:
    return number((answer.get("header") or {}).get("raft_term"))
