"""Cache of whole-source scans, reused while the store does not change and for a limited time afterwards.

Law: while the store changes, a scan is repeated after ten times its own duration. A caller that finds a
scan outdated invalidates it. Invariant: a scan of a bucket is never used for a later bucket of that
name.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from meshd.util.async_tasks import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from meshd.util.clock import Clock

V = TypeVar("V", bound="Hashable")
L = TypeVar("L")
_KEPT: Final = 8
_SHARE: Final = 10


class _Scan(msgspec.Struct, Generic[L], frozen=True):
    found: L
    revision: object  # the store's revision before the scan
    done: float
    seconds: float


class SourceScanCache(Generic[V, L]):
    """The last scans, keyed by view and incarnations of its sources; one per worker and view kind."""

    def __init__(
        self,
        revision: Callable[[V], object],
        clock: Clock,
        scan: Callable[[V], Awaitable[L]],
        births: Callable[[V], Hashable] = lambda view: (),
    ) -> None:
        self._revision, self._clock, self._scan, self._births = revision, clock, scan, births
        self._scans: OrderedDict[tuple[V, Hashable], _Scan[L]] = OrderedDict()
        self._scanning: SingleFlight[tuple[V, Hashable], _Scan[L]] = SingleFlight()

    def __repr__(self) -> str:
        return f"<SourceScanCache of {len(self._scans)} views>"

    async def get_scan(self, view: V) -> L:
        """Return the scan of a source, which is current or recent. Raises as the scan function does."""
        name = (view, self._births(view))
        scan = self._scans.get(name)
        if scan is None or self._stale(view, scan):
            scan, _ = await self._scanning.run(name, lambda: self._run_scan(view))
            self._scans[name] = scan
            if len(self._scans) > _KEPT:
                self._scans.popitem(last=False)
        self._scans.move_to_end(name)
        return scan.found

    def invalidate_scan(self, view: V) -> bool:
        """Drop a scan that may be outdated. Returns whether anything was written since it was made."""
        name = (view, self._births(view))
        scan = self._scans.get(name)
        if scan is None or scan.revision == self._revision(view):
            return False
        del self._scans[name]
        return True

    def _stale(self, view: V, scan: _Scan[L]) -> bool:
        age = self._clock.monotonic() - scan.done
        return age > _SHARE * scan.seconds and self._revision(view) != scan.revision

    async def _run_scan(self, view: V) -> _Scan[L]:
        began, revision = self._clock.monotonic(), self._revision(view)
        found = await self._scan(view)
        now = self._clock.monotonic()
        return _Scan(found, revision, now, now - began)
