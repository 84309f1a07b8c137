"""What a job stands on while it works, for hours perhaps: its maker's rights, and whose its buckets are.

Law: rights are looked up once and used many times, so what they were made of is looked at again and again.
Work that began on what is no more ends; it begins anew on what is there now, or not at all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshd.service.jobs.principals import caller_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.identities import IdentityTable
    from meshd.control.jobs import Principal
    from meshd.service.authorization.access import Caller
    from meshwire.jobspecs import JobSpec

_LOOK: Final = 1.0  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Footing:
    """Equal while nothing changed that rights are made of: `rights` of the maker, and what the source's and
    the target's `buckets` say of who may; None for one that is not there."""

    caller: Caller = field(compare=False)
    rights: tuple[object, ...]
    buckets: tuple[tuple[object, ...] | None, ...]


def footing(principal: Principal, spec: JobSpec, identities: IdentityTable, buckets: BucketTable) -> Footing:
    """Of this moment. Raises BatchError AccessDenied when the key is gone, or the session was revoked."""
    caller = caller_of(principal, identities)
    names = (spec.source.bucket, spec.target.bucket)
    return Footing(caller, _rights(principal, identities), tuple(_said(buckets.get(name)) for name in names))


def _rights(principal: Principal, identities: IdentityTable) -> tuple[object, ...]:
    """As they are written down: policies that were read are equal to nothing but themselves."""
    signer = identities.find(principal.parent or principal.access_key)
    if signer is None:
        return ()
    user, key = signer.user.policies, signer.key.policies
    return (signer.user.root, user, key, *[identities.policies().get(name) for name in (*user, *key)])


def _said(bucket: Bucket | None) -> tuple[object, ...] | None:
    if bucket is None:
        return None
    said = (bucket.policy, bucket.acl, bucket.public_access, bucket.ownership)
    return (bucket.created_ms, bucket.owner, *said)


async def upheld(work: Coroutine[Any, Any, None], look: Callable[[], Footing], began: Footing) -> bool:
    """Whether the work came to its end on the footing on which it `began`; else it is stopped. Raises what
    the work raises, and `look`."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=_LOOK))[0]:
            if look() != began:
                return False
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return True
