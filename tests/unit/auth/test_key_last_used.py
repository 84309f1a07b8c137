"""When keys were last used: told by every process, written rarely, forgotten with the key."""

from __future__ import annotations

import asyncio

from meshd.control.identities import KeyLastUsed
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

HOUR = 3_600_000


def test_uses_are_saved_at_most_once_an_hour_and_told_everywhere() -> None:
    control = MemoryControl(ManualClock())
    use, other = KeyLastUsed(control), KeyLastUsed(control)

    async def main() -> None:
        use.record_use("A1")
        assert use.last_used_ms("A1") == 0
        await use.save(HOUR, {"A1"})
        assert (use.last_used_ms("A1"), other.last_used_ms("A1"), other.last_used_ms("A2")) == (HOUR, HOUR, 0)
        written = control.revision("keyuse")
        await use.save(3 * HOUR, {"A1"})  # nothing was noted since
        other.record_use("A1")
        await other.save(2 * HOUR - 1, {"A1"})
        assert control.revision("keyuse") == written
        other.record_use("A1")
        await other.save(2 * HOUR, {"A1"})
        assert use.last_used_ms("A1") == 2 * HOUR
        await use.forget("A1")
        await use.forget("A1")
        assert other.last_used_ms("A1") == 0

    asyncio.run(main())


def test_of_keys_that_are_gone_nothing_is_kept() -> None:
    use = KeyLastUsed(MemoryControl(ManualClock()))

    async def main() -> None:
        use.record_use("A1")
        use.record_use("A2")
        await use.save(HOUR, {"A1", "A2"})
        await use.save(25 * HOUR, {"A1"})  # A2 went with the users file; it may only be late
        assert (use.last_used_ms("A1"), use.last_used_ms("A2")) == (HOUR, HOUR)
        await use.save(26 * HOUR, {"A1"})
        assert (use.last_used_ms("A1"), use.last_used_ms("A2")) == (HOUR, 0)

    asyncio.run(main())
