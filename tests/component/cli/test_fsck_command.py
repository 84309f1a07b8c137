"""What `meshd fsck` says of damage that only the rebuild of the index has found."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from click.testing import CliRunner

from meshd.cli.fsck import fsck
from meshd.config import StoreSettings
from meshd.store.store import Store
from meshd.util.clock import SystemClock
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_rebuild_leaves_out_is_a_problem(tmp_path: Path) -> None:
    with closing(Store.open(StoreSettings.at(tmp_path), writer="w0", clock=SystemClock())) as store:
        asyncio.run(put_object(store, "one", b"left as it was"))
        asyncio.run(put_object(store, "other", b"to be damaged"))
    (segment,) = tmp_path.glob("extents/*/*.tar")
    segment.write_bytes(segment.read_bytes().replace(b"to be damaged", b"to be DAMAGED"))
    said = CliRunner().invoke(fsck, ["--data-dir", str(tmp_path), "--rebuild"])
    assert said.exit_code == 1, said.output
    assert "lost: " in said.output
    assert said.output.splitlines()[-1].startswith("1 problems: restore these objects from a backup")
