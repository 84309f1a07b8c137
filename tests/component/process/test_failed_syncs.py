"""A daemon whose index fails to sync once: it serves again by itself, and has what it acknowledged."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.daemons import Daemon
from tests.support.fuse_mount import mounted, require_fuse

if TYPE_CHECKING:
    from pathlib import Path

require_fuse()


def test_a_meta_page_that_could_not_be_synced(tmp_path: Path) -> None:
    """LMDB refuses all use of the index in that process from then on: another one takes its place."""
    source, mount = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    mount.mkdir()
    module = "tests.powercuts.forgetful_file_system"
    with (
        mounted(source, mount, "--seed", "1", "--fail-meta-sync", "/fail", module=module),
        Daemon.start(mount / "data") as daemon,
        closing(daemon.client()) as client,
    ):
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="before", Body=b"1")
        (mount / "fail").touch()
        refused, written, end = 0, False, time.monotonic() + WAIT_TIMEOUT
        while not written and time.monotonic() < end:
            try:
                client.put_object(Bucket="bucket", Key="after", Body=b"2")
                written = True
            except (ClientError, BotoCoreError):
                refused += 1
                time.sleep(0.1)
        assert written
        assert refused
        found = [client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in ("before", "after")]
        assert found == [b"1", b"2"]
