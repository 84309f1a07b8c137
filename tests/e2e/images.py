"""`python -m tests.e2e.images`: what `make images` built, checked inside each image.

Sizes, labels, the user, the list of components; then the programs image_daemon.py and image_operator.py run
there. Needs the builder that built them; exits with 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.image_daemon import many_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"meshd": 300, "operator": 150}  # MB, uncompressed, with the base
GOLDEN = json.loads((ROOT / "tests/golden/ops/images.json").read_text())
LABELS = ("title", "version", "revision", "licenses", "created")
APART = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""A network of its own for what shares the machine's with buildah's chroot: port 9000 may be taken there."""
SBOM = "/opt/mesh/sbom.cdx.json"


class ImageError(Exception):
    """An image is not as it should be."""


class Builder:
    """docker, podman or buildah, with the images it has."""

    def __init__(self, program: str) -> None:
        self._program = program

    def _run(
        self, *arguments: str, check: bool = True, before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*before, self._program, *arguments], capture_output=True, text=True, check=False, timeout=600
        )
        if check and done.returncode != 0:
            raise ImageError(f"{self._program} {arguments[0]}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done

    def has(self, image: str) -> bool:
        """Return whether it has the image."""
        return self._run("inspect", "--type", "image", image, check=False).returncode == 0

    def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of a container of the image."""
        found = json.loads(self._run("inspect", "--type", "image", image).stdout)
        if self._program == "buildah":
            return dict(found["Docker"]["config"])
        return dict(found[0]["Config"])

    def megabytes(self, image: str) -> float:
        """Return the uncompressed size, as the builder counts it."""
        if self._program != "buildah":
            return float(json.loads(self._run("inspect", "--type", "image", image).stdout)[0]["Size"]) / 1e6
        listed = json.loads(self._run("images", "--json", image).stdout)
        number, unit = listed[0]["size"].split()
        return float(number) * {"KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]

    def run(self, image: str, *command: str) -> str:
        """Run a command in the image, as its user, beside this checkout's tests; return what it printed."""
        mount = f"{ROOT / 'tests'}:/check/tests:ro"
        if self._program != "buildah":
            options = ["--rm", "--read-only", "--tmpfs", "/tmp", "--volume", mount, "--workdir", "/check"]
            return self._run("run", *options, "--entrypoint", command[0], image, *command[1:]).stdout
        container = self._run("from", "--pull-never", image).stdout.strip()
        try:
            options = ["--volume", mount, "--workingdir", "/check"]
            apart = APART if os.environ.get("BUILDAH_ISOLATION") == "chroot" else ()
            return self._run("run", *options, container, "--", *command, before=apart).stdout
        finally:
            self._run("rm", container)


def answers(program: str) -> bool:
    """Return whether the builder is there; a client of Docker may be there without a server."""
    if shutil.which(program) is None:
        return False
    return subprocess.run([program, "info"], capture_output=True, check=False, timeout=60).returncode == 0


def check(builder: Builder, name: str, image: str) -> dict[str, Any]:
    """Check one image; return what was found. Raises ImageError."""
    size, config = builder.megabytes(image), builder.config(image)
    if size > LIMITS[name]:
        raise ImageError(f"{image} has {size:.0f} MB, more than {LIMITS[name]}")
    labels = config["Labels"]
    empty = [each for each in LABELS if not labels.get(f"org.opencontainers.image.{each}")]
    if empty:
        raise ImageError(f"{image}: labels without a value: {empty}")
    command = [*config["Entrypoint"], *(config.get("Cmd") or ())]
    if name == "meshd":
        if "Healthcheck" not in config:
            raise ImageError(f"{image} has no health check: buildah needs --format docker")
        arguments = ["image_daemon", json.dumps(command), json.dumps(config["Healthcheck"]["Test"][1:])]
    else:
        arguments = ["image_operator", *command]
    printed = builder.run(image, "python", "-m", f"tests.e2e.{arguments[0]}", *arguments[1:])
    found = json.loads(printed.splitlines()[-1])
    if found["identity"] != {"uid": 65532, "gid": 65532, "name": "mesh"}:
        raise ImageError(f"{image} runs as {found['identity']}")
    if name == "meshd":
        compare_pixels(found)
    components = [each["name"] for each in json.loads(builder.run(image, "cat", SBOM))["components"]]
    if "shardmesh" not in components or "numpy" not in components:
        raise ImageError(f"{SBOM} names {components}")
    return {"MB": round(size), "components": len(components)} | {
        key: value for key, value in found.items() if key in ("modules", "libraries", "metrics", "health")
    }


def compare_pixels(found: dict[str, Any]) -> None:
    """The image's OpenCV and the one of this environment give equal pixels. Raises ImageError."""
    if found["golden"] != GOLDEN:
        different = [name for name, value in found["golden"].items() if GOLDEN[name] != value]
        raise ImageError(f"other pixels than tests/golden/ops/images.json: {different}")
    if found["pixels"] != many_shapes():
        raise ImageError("for images of other shapes, pixels differ from those of this environment")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.e2e.images", description=__doc__)
    made.add_argument("--builder", default=os.environ.get("BUILDER"), help="default: the first there is")
    made.add_argument("--registry", default="registry.example.com/shardmesh")
    made.add_argument("--tag", default="0.1.0")
    made.add_argument("names", nargs="*", metavar="meshd|operator", help="default: both")
    return made


def main() -> int:
    options = parser().parse_args()
    programs = [options.builder] if options.builder else ["docker", "podman", "buildah"]
    program = next(filter(answers, programs), None)
    if program is None:
        print(f"images are not checked: none of {programs} answers", file=sys.stderr)
        return 0
    builder = Builder(program)
    for name in options.names or LIMITS:
        image = f"{options.registry}/{name}:{options.tag}"
        if not builder.has(image):
            print(f"{image} is not checked: {program} does not have it (`make images`)", file=sys.stderr)
            continue
        try:
            print(f"{image}: {json.dumps(check(builder, name, image))}")
        except ImageError as error:
            print(f"{image}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
