"""What is below a directory, as the kernel's list of mounts tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.store.disks.file_systems import file_system_of, require_index_file_system
from meshd.store.errors import FormatError

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,nobarrier,data=writeback
40 22 0:50 / /mnt/nfs rw - nfs4 server:/export rw,vers=4.2
41 22 0:51 / /mnt/cifs rw - cifs //server/share rw
42 22 0:52 / /mnt/plan9 rw - 9p host rw
43 22 0:53 / /mnt/ssh rw - fuse.sshfs me@server: rw
44 22 0:54 / /mnt/s3 rw - fuse s3fs rw
45 22 0:55 / /mnt/own rw - fuse.own own rw
46 22 0:56 / /mnt/memory rw - tmpfs tmpfs rw
47 22 0:57 / /mnt/layers rw - overlay overlay rw,lowerdir=/a
48 22 8:1 / /mnt/a\040disk rw - xfs /dev/sdb1 rw
49 48 0:58 / /mnt/a\040disk/deep rw - nfs server:/deep rw
50 22 8:1 / /mnt/nfs/local rw - xfs /dev/sdb1 rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("place", "kind", "network"),
    [
        ("/srv/data", "ext4", False),
        ("/mnt/nfs/data", "nfs4", True),
        ("/mnt/nfs/local/data", "xfs", False),
        ("/mnt/cifs", "cifs", True),
        ("/mnt/plan9", "9p", True),
        ("/mnt/ssh/a", "fuse.sshfs", True),
        ("/mnt/s3/a", "fuse", True),
        ("/mnt/own/a", "fuse.own", False),
        ("/mnt/memory", "tmpfs", False),
        ("/mnt/layers", "overlay", False),
        ("/mnt/a disk/index", "xfs", False),
        ("/mnt/a disk/deep/index", "nfs", True),
        ("/mnt/a disk/deeper", "xfs", False),
    ],
)
def test_it_is_the_nearest_mount(mounts: Path, place: str, kind: str, network: bool) -> None:
    found = file_system_of(Path(place), mounts)
    assert found is not None
    assert (found.kind, found.is_network) == (kind, network)
    if network:
        with pytest.raises(FormatError, match=r"may be damaged without notice. .* is on .* --index-dir"):
            require_index_file_system(Path(place), mounts)


def test_options_that_weaken_promises(mounts: Path, tmp_path: Path) -> None:
    found = file_system_of(tmp_path, mounts)
    assert found is not None
    assert [weakness.partition(":")[0] for weakness in found.weaknesses] == ["nobarrier", "data=writeback"]


def test_a_partition_has_the_cache_of_its_disk(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "devices" / "sdb" / "sdb1").mkdir(parents=True)
    (tmp_path / "devices" / "sdb" / "queue").mkdir()
    (tmp_path / "devices" / "sdb" / "queue" / "write_cache").write_text("write back\n")
    (tmp_path / "8:1").symlink_to(tmp_path / "devices" / "sdb" / "sdb1")
    found = file_system_of(Path("/mnt/a disk"), mounts, tmp_path)
    assert found is not None
    assert found.write_cache == "write back"


def test_the_real_list(tmp_path: Path) -> None:
    assert file_system_of(tmp_path) is not None
    require_index_file_system(tmp_path)


def test_no_list(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path / "none") is None
