"""What the images keep is enough: daemon and operator run with no other modules than theirs.

The Dockerfiles install more than the programs use, and uninstall some of it again. Here a real node, its
client and the operator find of this environment what would be left. `make e2e` does the same in images that
were built.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshd.process.local_etcd import reserve_port
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fork_server import forked_from
from tests.support.image_environment import ROOT, ImageEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping

MESHD = (ROOT / "docker" / "meshd.Dockerfile").read_text()
OPERATOR = (ROOT / "docker" / "operator.Dockerfile").read_text()


def without(dockerfile: str, library: str) -> ImageEnvironment:
    """What the image would have if it uninstalled this library, too."""
    first = " uninstall --yes "
    assert dockerfile.count(first) == 1
    return ImageEnvironment.read(dockerfile.replace(first, f"{first}{library} "))


def run(
    image: ImageEnvironment, code: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code of this checkout with what the image has."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": path, **image.variables, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def import_everything(image: ImageEnvironment, *packages: str) -> subprocess.CompletedProcess[str]:
    return run(
        image, f"from tests.e2e.image_contents import import_everything as all; print(all({packages}))"
    )


def test_the_daemons_image_is_read_from_its_dockerfile() -> None:
    image = ImageEnvironment.read(MESHD)
    assert image.projects == (".[server,tracing]", "./tools")
    assert {"huggingface-hub", "pygments"} <= image.uninstalled
    assert image.deleted == {"meshoperator"}
    assert {"lmdb", "rich", "opentelemetry-proto", "protobuf", "simpy"} <= image.distributions()
    missing = image.missing()
    assert {"huggingface_hub", "pygments", "torch", "boto3", "pytest", "aiohttp", "pip"} <= missing
    assert {"meshoperator", "ensurepip", "lib2to3", "readline", "*.tests", "numpy.f2py"} <= missing
    present = {"meshd", "meshsdk", "meshtools", "numpy", "lmdb", "packaging", "yaml", "PIL", "backports"}
    assert missing.isdisjoint(present)


def test_the_operators_image_is_read_from_its_dockerfile() -> None:
    image = ImageEnvironment.read(OPERATOR)
    assert {"awscrt", "rich", "pygments", "meshd", "meshsdk", "meshtools", "lmdb"} <= image.missing()
    assert image.missing().isdisjoint({"meshoperator", "meshwire", "numpy", "lightkube", "aiohttp"})


def test_a_program_finds_what_the_image_has_and_nothing_else() -> None:
    told = run(
        ImageEnvironment.read(MESHD),
        "import importlib.util as u, numpy\n"
        "print(*[name for name in ('lmdb', 'pygments', 'torch', 'test', 'numpy.tests', 'numpy.linalg',"
        " 'numpy.f2py') if u.find_spec(name)])",
    )
    assert told.stdout.split() == ["lmdb", "numpy.linalg"], told.stderr


def test_every_module_of_the_daemons_image_loads() -> None:
    done = import_everything(ImageEnvironment.read(MESHD), "meshd", "meshsdk", "meshwire", "meshtools")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500


def test_every_module_of_the_operators_image_loads() -> None:
    done = import_everything(ImageEnvironment.read(OPERATOR), "meshoperator", "meshwire")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


CHOOSE_WHEELS = (
    "from meshd.transform.sandbox.wheel_tags import choose_wheels\n"
    "print(*choose_wheels(['lib-1.0-py3-none-any.whl']))"
)


def test_a_daemon_of_the_image_chooses_the_wheels_of_user_ops() -> None:
    """What that needs is imported with the first such op: a start does not tell whether it is there."""
    done = run(ImageEnvironment.read(MESHD), CHOOSE_WHEELS)
    assert done.stdout.split() == ["lib-1.0-py3-none-any.whl"], done.stderr
    done = run(without(MESHD, "packaging"), CHOOSE_WHEELS)
    assert done.returncode != 0
    assert "No module named 'packaging'" in done.stderr


def test_a_daemon_of_the_image_serves_objects_user_ops_and_batches() -> None:
    image = ImageEnvironment.read(MESHD)
    with forked_from(None), Daemon.start(env=image.variables) as daemon:
        keys = {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        }
        use = f"from tests.e2e.image_daemon import use_daemon; print(*use_daemon({daemon.endpoint!r}))"
        done = run(image, use, keys)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["jpg", "png", "webp"]
        assert daemon.stop() == 0


@pytest.mark.parametrize("library", ["uvloop", "lmdb"])
def test_a_daemon_without_what_it_needs_does_not_start(library: str) -> None:
    image = without(MESHD, library)
    with (
        forked_from(None),
        pytest.raises(DaemonFailedError, match=f"No module named '{library}'"),
    ):
        Daemon.start(env=image.variables)


def test_the_operator_of_the_image_runs() -> None:
    command, health = [sys.executable, "-m", "meshoperator"], f"127.0.0.1:{reserve_port()}"
    use = f"from tests.e2e.image_operator import start_operator as run; print(run({command}, {health!r}))"
    done = run(ImageEnvironment.read(OPERATOR), use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")


def test_the_operators_image_without_what_it_needs_is_told() -> None:
    done = import_everything(without(OPERATOR, "cronsim"), "meshoperator")
    assert done.returncode != 0
    assert "No module named 'cronsim'" in done.stderr
