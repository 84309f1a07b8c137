"""Disks that produce damaged data again and again, although each damage is repaired from another node.

Law: one burst of damage, such as a bad sector under many objects, counts once; damage in several different
hours of a day is a disk that decays. What is known outlasts restarts, if the caller keeps `damage`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.integrity.scrub import DiskDamage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.store.disks.health_monitor import DiskState
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.disks")
INTERVAL: Final = 60.0
"""Seconds between two readings of the counts of damage."""
_HOUR: Final = 3600.0
_DAY: Final = 24
HOURS: Final = 3
"""Different hours of a day with damage, from which on a disk decays; as in the alert ShardmeshDiskDecays."""
WHY: Final = "keeps producing damaged data, which other nodes repair: replace it (ShardmeshDiskDecays)"


class DecayingDisks:
    """One per node, in its coordinator. `damage`, by directory: what is known of the disks."""

    def __init__(self, clock: Clock, damage: Mapping[str, DiskDamage]) -> None:
        self._clock, self._observed_at = clock, -INTERVAL
        self.damage = dict(damage)
        self._reported: set[str] = set()

    def __repr__(self) -> str:
        return f"<DecayingDisks {sorted(self._reported)}>"

    def is_due(self) -> bool:
        """Return whether it is time for `observe`."""
        return self._clock.monotonic() >= self._observed_at + INTERVAL

    def observe(self, counts: Mapping[str, float]) -> None:
        """Record how many damaged versions and parts each disk, by directory, has had so far. Log a disk that
        decays, once."""
        self._observed_at = self._clock.monotonic()
        hour = int(self._clock.now_ms() / 1e3 / _HOUR)
        for path in {*counts, *self.damage}:
            known, count = self.damage.get(path, DiskDamage()), counts.get(path, 0.0)
            hours = {then for then in known.hours if hour - _DAY < then <= hour}
            if count > (known.count if count >= known.count else 0):  # a restart of the node counts from 0
                hours.add(hour)
            self.damage[path] = DiskDamage(count, tuple(sorted(hours)))
            if len(hours) < HOURS:
                self._reported.discard(path)
            elif path not in self._reported:
                self._reported.add(path)
                _log.error("a disk %s", WHY, extra={"disk": path, "damaged": int(count)})

    def mark_decaying(self, disks: Iterable[DiskState]) -> tuple[DiskState, ...]:
        """Return the states of disks with `why` set for those that serve but decay."""
        return tuple(
            msgspec.structs.replace(disk, why=WHY) if disk.serves and disk.path in self._reported else disk
            for disk in disks
        )
