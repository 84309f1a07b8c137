"""etcd versions that may answer before a change is on disk, and whether one of them is in use.

Source: issue 14370 of etcd, "Durability API guarantee broken in single node cluster".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from meshd.control.etcd.gateway import EtcdError

if TYPE_CHECKING:
    from meshd.control.etcd.gateway import Gateway

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_MENDED: Final = ((3, 4, 21), (3, 5, 5))


def may_answer_early(version: str) -> bool:
    """Whether etcd of this version, if it is the only member, may answer a change before its log is synced.
    False for a version that cannot be parsed."""
    found = _VERSION.match(version)
    if found is None:
        return False
    number = tuple(map(int, found.groups()))
    return number < _MENDED[0] or (3, 5, 0) <= number < _MENDED[1]


def early_answers(gateway: Gateway) -> str:
    """Return why a power cut may take back changes that this etcd has acknowledged; empty if it does not, or
    does not say what it is."""
    try:
        version = str(gateway.call("maintenance/status", {}, repeatable=True).get("version", ""))
        if not may_answer_early(version):
            return ""
        members = gateway.call("cluster/member/list", {}, repeatable=True).get("members") or []
    except EtcdError:
        return ""
    if len(members) != 1:
        return ""
    return (
        f"etcd {version} with one member answers before a change is on disk: a power cut may take back what "
        "was acknowledged of buckets, users and jobs; use etcd 3.4.21, 3.5.5 or newer, or three members"
    )
