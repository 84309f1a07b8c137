"""What is read once for a request is never older than the request: buckets, keys, users and roles in blocks
of `pin_revisions`, over the real engine."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshd.control.buckets import Bucket, BucketTable
from meshd.control.embedded import EmbeddedControl
from meshd.control.identities import Account, IdentityTable, Key, KeyLastUsed, User
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

USER = User(user_id="ann", display_name="Ann")
KEY = Key(access_key="ann-key", user_id="ann", secret_key="ann-secret-key")


def test_each_write_is_seen_by_the_next_block(tmp_path: Path) -> None:
    async def main() -> None:
        control = EmbeddedControl(tmp_path, ManualClock())
        buckets, people, use = BucketTable(control), IdentityTable(control), KeyLastUsed(control)
        await people.replace_accounts(frozenset({"admin"}), [Account(USER, KEY)], 0)
        await buckets.create(Bucket("b", "ann", 1))

        def looked_up() -> tuple[bool, bool, bool]:
            """Twice in a block, as a request does."""
            with control.pin_revisions():
                found = [
                    (
                        people.find_signer("ann-key") is not None,
                        buckets.get("b") is not None,
                        bool((bucket := buckets.get("b")) and bucket.policy),
                    )
                    for _ in range(2)
                ]
            assert found[0] == found[1]
            return found[0]

        for _ in range(3):
            assert looked_up() == (True, True, False)
            await people.update_entry(Key, "ann-key", lambda key: key and replace(key, enabled=False))
            assert looked_up() == (False, True, False)
            use.record_use("ann-key")
            await use.save(10**12, {"ann-key"})  # a write that concerns neither
            assert looked_up() == (False, True, False)
            await people.update_entry(Key, "ann-key", lambda key: key and replace(key, enabled=True))
            await buckets.update("b", lambda bucket: replace(bucket, policy="{}"))
            assert looked_up() == (True, True, True)
            await buckets.delete("b")
            assert looked_up() == (True, False, False)
            await people.update_entry(User, "ann", lambda _: None)
            assert looked_up() == (False, False, False)
            await people.update_entry(User, "ann", lambda _: USER)
            await buckets.create(Bucket("b", "ann", 2))
        control.close()

    asyncio.run(main())


def test_another_thread_sees_what_was_written_during_a_block(tmp_path: Path) -> None:
    async def main() -> None:
        control = EmbeddedControl(tmp_path, ManualClock())
        buckets, found = BucketTable(control), list[tuple[str, bool]]()
        await buckets.create(Bucket("before", "ann", 1))

        def write_and_look() -> None:
            asyncio.run(buckets.create(Bucket("meanwhile", "ann", 1)))
            found.append(("thread", buckets.get("meanwhile") is not None))

        with control.pin_revisions():
            assert buckets.get("before") is not None
            thread = threading.Thread(target=write_and_look)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            assert buckets.get("before") is not None
        assert found == [("thread", True)]
        with control.pin_revisions():
            assert buckets.get("meanwhile") is not None
        control.close()

    asyncio.run(main())
