"""Bucket policies, compiled when first asked.

Law: a compiled policy belongs to one value of a bucket, so that a change is seen at once. Invariant: a
policy that cannot be read denies everything (a bucket's owner and root can still put another).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from meshwire.policies import PolicyError, parse_policy

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshwire.policies import Policy

_log = logging.getLogger("meshd.service.compiling")
_MOST: Final = 4096
_CLOSED: Final = parse_policy(
    '{"Version": "2012-10-17", "Statement":'
    ' {"Effect": "Deny", "Principal": "*", "Action": "*", "NotResource": "arn:aws:s3:::-"}}',
    kind="bucket",
    bucket="-",
)


class CompiledPolicies:
    """By bucket. One per process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Bucket, Policy]] = {}

    def __repr__(self) -> str:
        return f"<CompiledPolicies of {len(self._known)} buckets>"

    def of(self, bucket: Bucket) -> Policy:
        """The policy of a bucket that has one."""
        known = self._known.get(bucket.name)
        if known is not None and known[0] is bucket:
            return known[1]
        if len(self._known) >= _MOST:
            self._known.clear()
        policy = known[1] if known is not None and known[0].policy == bucket.policy else _compiled(bucket)
        self._known[bucket.name] = (bucket, policy)
        return policy


def _compiled(bucket: Bucket) -> Policy:
    try:
        return parse_policy(bucket.policy, kind="bucket", bucket=bucket.name)
    except PolicyError as error:
        _log.error("the policy of bucket %s cannot be read and denies everything: %s", bucket.name, error)
        return _CLOSED
