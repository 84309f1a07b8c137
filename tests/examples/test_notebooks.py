"""Every notebook runs from its first cell to its last, against one node, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import meshsdk as mesh
from tests.support.daemons import Daemon
from tests.support.interpreters import python

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = ("images", "science", "segmentation", "sound", "tables", "text", "video")


class Kernel(AsyncKernelManager):
    """IPython in an interpreter that has loaded what notebooks import."""

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        return [python(), *super().format_kernel_cmd(extra_arguments)[1:]]


@pytest.mark.sampled(2)
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # of Jupyter's own libraries
def test_every_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        for name in NAMES:
            book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
            assert not any(cell.get("outputs") for cell in book.cells), f"{name}: clear its outputs"
            place = {"metadata": {"path": str(tmp_path)}}
            NotebookClient(book, timeout=120, resources=place, kernel_manager_class=Kernel).execute()
        with mesh.connect() as client:
            assert client.buckets() == ()
