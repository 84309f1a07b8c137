"""What the kernel tells of memory, of folders that look like its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshd.process.memory_usage import MemoryRoom, memory_room, resident_by_role

if TYPE_CHECKING:
    from pathlib import Path

_MIB = 1 << 20
_STAT = "anon 1\nactive_file {}\nfile 9\ninactive_file {}\nslab_reclaimable 0\n"


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    found = tmp_path / "proc"
    _write(found / "meminfo", f"MemTotal: {1000 << 10} kB\nMemAvailable: {400 << 10} kB\nHugePages_Total: 0")
    return found


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def _group(folder: Path, limit: object, used: int, files: int) -> None:
    _write(folder / "memory.max", limit)
    _write(folder / "memory.current", used * _MIB)
    _write(folder / "memory.stat", _STAT.format(files * _MIB, files * _MIB))


def test_a_machine_without_limits(proc: Path, groups: Path) -> None:
    assert memory_room(proc, groups) == MemoryRoom(400 * _MIB, 1000 * _MIB)
    _write(proc / "self" / "cgroup", "0::/mine")
    _group(groups / "mine", "max", 100, 0)
    assert memory_room(proc, groups) == MemoryRoom(400 * _MIB, 1000 * _MIB)
    assert memory_room(proc / "none", groups) is None


def test_the_limit_that_is_nearest_counts_and_files_are_given_back(proc: Path, groups: Path) -> None:
    _write(proc / "self" / "cgroup", "0::/pods/mine")
    _group(groups / "pods" / "mine", 500 * _MIB, 480, 50)
    assert memory_room(proc, groups) == MemoryRoom(120 * _MIB, 500 * _MIB)
    _group(groups / "pods", 600 * _MIB, 590, 0)
    assert memory_room(proc, groups) == MemoryRoom(10 * _MIB, 600 * _MIB)


def test_a_container_sees_its_own_group_as_the_outermost(proc: Path, groups: Path) -> None:
    _write(proc / "self" / "cgroup", "0::/../of/the/host")
    _group(groups, 300 * _MIB, 290, 0)
    assert memory_room(proc, groups) == MemoryRoom(10 * _MIB, 300 * _MIB)


def test_control_groups_of_version_1(proc: Path, groups: Path) -> None:
    _write(proc / "self" / "cgroup", "4:memory:/mine\n3:cpuset:/\n0::/")
    mine = groups / "memory" / "mine"
    _write(mine / "memory.limit_in_bytes", 200 * _MIB)
    _write(mine / "memory.usage_in_bytes", 199 * _MIB)
    _write(mine / "memory.stat", f"active_file 0\ntotal_active_file {4 * _MIB}")
    _write(groups / "memory" / "memory.limit_in_bytes", 9223372036854771712)
    _write(groups / "memory" / "memory.usage_in_bytes", 1)
    assert memory_room(proc, groups) == MemoryRoom(5 * _MIB, 200 * _MIB)


def _process(proc: Path, pid: int, comm: str, mib: int, *children: int) -> None:
    _write(proc / str(pid) / "comm", comm)
    status = f"Name: {comm}\nRssAnon: {mib << 10} kB\nRssFile: {900 << 10} kB\nRssShmem: 0 kB\nVmSwap: 0 kB"
    _write(proc / str(pid) / "status", status)
    _write(proc / str(pid) / "task" / str(pid) / "children", " ".join(map(str, children)))


def test_processes_by_role_with_what_they_started(proc: Path) -> None:
    _process(proc, 1, "meshd", 10, 2, 3, 4, 9)
    _process(proc, 2, "worker-0", 20)
    _process(proc, 3, "worker-1", 30)
    _process(proc, 4, "transform-0", 40, 5)
    _process(proc, 5, "python", 50)
    mib = {role: size // _MIB for role, size in resident_by_role(1, proc).items()}
    assert mib == {"supervisor": 10, "worker": 50, "transform": 90}  # 9 ended meanwhile
