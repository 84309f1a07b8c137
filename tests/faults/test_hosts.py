"""What is done to a host's disk is done, whatever its daemon does there at the same time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.faults.hosts import corrupt

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 100_000


def test_a_data_file_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "gone.tar").symlink_to(tmp_path / "nowhere")
    (tmp_path / "small.tar").write_bytes(bytes(10))
    assert corrupt(tmp_path, random.Random(1)) == 0
    (tmp_path / "there.tar").write_bytes(bytes(SIZE))
    assert corrupt(tmp_path, random.Random(1)) == 1
    turned = (tmp_path / "there.tar").read_bytes()
    assert len(turned) == SIZE
    assert 0 < sum(byte == 0xFF for byte in turned) <= 64
