"""restic and rclone over twenty thousand files: what comes back is compared with what went in."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.conformance.knowing import PASSED
from tests.compat.homes import HOMES_AT
from tests.compat.suites.places import ProgramError, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.compat.suites.places import Place

FILES = 20_000


class Steps:
    """Steps of one program, each a test of the suite: one that raises fails, and ends it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def do(self, name: str, step: Callable[[], str | None]) -> bool:
        """Run it; it returns what is wrong, or nothing."""
        begin = time.monotonic()
        try:
            wrong = step()
        except (ProgramError, ValueError) as error:
            wrong = str(error)
        self.outcomes[name] = " ".join(wrong.split())[-300:] if wrong else PASSED
        print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)
        return not wrong


def tree(folder: Path, files: int, seed: int = 1) -> int:
    """Files of 0 to 16 kB in folders of folders, with odd names among them; the bytes of all."""
    chance, total = random.Random(seed), 0
    for number in range(files):
        where = folder / f"d{number % 37:02}" / f"e{number // 37 % 23:02}"
        where.mkdir(parents=True, exist_ok=True)
        odd = "" if number % 50 else " ä+&%41'#"
        data = chance.randbytes(chance.choice((0, 1, 100, 1000, 4096, 16_384)))
        (where / f"{number:05}{odd}.bin").write_bytes(data)
        total += len(data)
    return total


def digest(folder: Path) -> dict[str, str]:
    """Path within the folder → digest of the bytes."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def unequal(one: Path, other: Path) -> str:
    """How the folders differ; empty when they do not."""
    here, there = digest(one), digest(other)
    wrong = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return f"{len(wrong)} of {len(here)} files differ: {', '.join(wrong[:3])}" if wrong else ""


def rclone(place: Place) -> Result:
    """Up, checked by hash, up again, listed, down, and away."""
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if program is None:
        raise ProgramError("there is no rclone: it comes with the development tools")
    place.environment.update(
        {
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_MESH_TYPE": "s3",
            "RCLONE_CONFIG_MESH_PROVIDER": "Other",
            "RCLONE_CONFIG_MESH_ENDPOINT": place.daemon.endpoint,
            "RCLONE_CONFIG_MESH_ENV_AUTH": "true",
            "RCLONE_CONFIG_MESH_REGION": "us-east-1",
            "RCLONE_RETRIES": "1",
            "RCLONE_LOW_LEVEL_RETRIES": "1",
        }
    )
    source, back, remote = place.scratch / "source", place.scratch / "back", "mesh:many-files/tree"
    total = tree(source, FILES)
    steps = Steps()

    def ask(*arguments: str) -> str:
        return place.run([str(program), *arguments])

    def sync() -> None:
        ask("sync", str(source), remote, "--transfers", "8", "--checkers", "8")

    def sync_again() -> str:
        said = ask("sync", str(source), remote, "--checksum", "--stats-one-line", "-v", "--use-json-log")
        stats = [json.loads(line) for line in said.splitlines() if '"stats"' in line]
        sent = stats[-1]["stats"]["transfers"] if stats else -1
        return f"{sent} files were sent again" if sent else ""

    def size() -> str:
        told = json.loads(ask("size", remote, "--json"))
        there = (told["count"], told["bytes"])
        return f"{there} instead of {(FILES, total)}" if there != (FILES, total) else ""

    def down() -> str:
        ask("sync", remote, str(back), "--transfers", "8")
        return unequal(source, back)

    def purge() -> str:
        ask("purge", "mesh:many-files")
        return "the bucket is still there" if "many-files" in ask("lsd", "mesh:") else ""

    ask("mkdir", "mesh:many-files")
    if steps.do("sync up", lambda: sync()):
        steps.do("check by hash", lambda: ask("check", str(source), remote) and "")
        steps.do("sync again sends nothing", sync_again)
        steps.do("size", size)
        steps.do("sync down is equal", down)
        steps.do("purge", purge)
    return Result(steps.outcomes, ask("version").split()[1].removeprefix("v"), _note(total))


def restic(place: Place) -> Result:
    """Two backups, all data checked, restored; one forgotten and pruned, checked and restored again."""
    program = restic_program()
    place.environment.update(
        {
            "RESTIC_REPOSITORY": f"s3:{place.daemon.endpoint}/restic/repo",
            "RESTIC_PASSWORD": "twenty thousand files",
            "RESTIC_CACHE_DIR": str(place.scratch / "cache"),
        }
    )
    source, back = place.scratch / "source", place.scratch / "back"
    total = tree(source, FILES)
    steps = Steps()

    def ask(*arguments: str) -> str:
        return place.run([program, "--quiet", *arguments])

    def restore() -> str:
        shutil.rmtree(back, ignore_errors=True)
        ask("restore", "latest", "--target", str(back))
        return unequal(source, back / source.relative_to("/"))

    def change() -> None:
        tree(source, FILES // 20, seed=2)
        ask("backup", str(source))

    def snapshots(number: int) -> str:
        there = len(json.loads(ask("snapshots", "--json")))
        return f"{there} snapshots" if there != number else ""

    def prune() -> str:
        ask("forget", "--keep-last", "1", "--prune")
        return snapshots(1)

    ask("init")
    if steps.do("backup", lambda: ask("backup", str(source)) and ""):
        steps.do("check all data", lambda: ask("check", "--read-data") and "")
        steps.do("restore is equal", restore)
        steps.do("backup of changes", lambda: change())
        steps.do("two snapshots", lambda: snapshots(2))
        steps.do("forget and prune", prune)
        steps.do("check all data again", lambda: ask("check", "--read-data") and "")
        steps.do("restore of the last is equal", restore)
    return Result(steps.outcomes, place.run([program, "version"]).split()[1], _note(total))


def restic_program() -> str:
    """The machine's, or the one of Debian's package, unpacked. Raises ProgramError where there is neither."""
    if there := shutil.which("restic"):
        return there
    where = HOMES_AT / "restic"
    program = where / "usr" / "bin" / "restic"
    if not program.exists():
        if shutil.which("apt-get") is None:
            raise ProgramError("there is no restic: install it with the system's package manager")
        where.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", "restic"], cwd=where, check=True, timeout=300)
        package = next(where.glob("restic_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=where, check=True, timeout=300)
    return str(program)


def _note(total: int) -> str:
    return f"{FILES:,} files, {total / 1e6:.0f} MB"
