"""The suites, by name.

Law: data. A suite with a `repository` runs tests that are in no package: it needs a checkout of `tag`, in a
folder called as the repository is. `packages` are of the same version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.compat.suites import commits, many_files, minio_js, python_suites

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.compat.suites.places import Place, Result

_COMMITS = f"{commits.WRITERS} processes commit {commits.COMMITS} times each to one table"
_MOTO = ("moto[s3,server]", "requests", "pytest", "pytest-timeout")


@dataclass(frozen=True, slots=True)
class Suite:
    """`about` is what the page says is run."""

    name: str
    about: str
    run: Callable[[Place], Result]
    packages: tuple[str, ...] = ()
    repository: str = ""
    tag: str = ""
    workers: int = 1

    @property
    def folder(self) -> str:
        """Of its checkout, within the folder of all."""
        return self.repository.rpartition("/")[2]

    @property
    def clone(self) -> str:
        """The command that gets its checkout."""
        return f"git clone --depth 1 --branch {self.tag} {self.repository} DIR/{self.folder}"


SUITES = (
    Suite(
        "minio-py",
        "all of its functional tests",
        python_suites.minio_py,
        ("minio==7.2.20",),
        "https://github.com/minio/minio-py",
        "7.2.20",
    ),
    Suite(
        "minio-js",
        "all of its functional tests",
        minio_js.run,
        (),
        "https://github.com/minio/minio-js",
        "8.0.7",
    ),
    Suite(
        "s3fs",
        "all its tests, including fsspec's generic ones",
        python_suites.s3fs,
        ("s3fs[boto3]==2026.4.0", "pytest-env", "pytest-asyncio", "flask", "flask_cors", *_MOTO),
        "https://github.com/fsspec/s3fs",
        "2026.4.0",
    ),
    Suite(
        "zarr-python",
        "its store tests over fsspec, and over obstore",
        python_suites.zarr,
        (
            "zarr==3.1.6",
            "s3fs[boto3]==2026.4.0",
            "obstore",
            "pytest-asyncio",
            "pytest-benchmark",
            "pytest-accept",
            "numpydoc",
            "hypothesis",
            *_MOTO,
        ),
        "https://github.com/zarr-developers/zarr-python",
        "v3.1.6",
    ),
    Suite(
        "s3torchconnector",
        "its end-to-end tests: data sets, checkpoints, several processes",
        python_suites.s3torchconnector,
        (
            "s3torchconnector[dcp]==1.5.0",
            "torch==2.13.0",  # as in the development tools: a CPU build
            "torchdata<=0.9.0",  # the suite's own bound
            "lightning>=2.0",
            "torchmetrics",
            "boto3",
            "s3fs",
            "Pillow",
            "numpy",
            "requests",
            "hypothesis",
            "zstandard",
            "pytest",
            "pytest-timeout",
        ),
        "https://github.com/awslabs/s3-connector-for-pytorch",
        "v1.5.0",
    ),
    Suite(
        "icechunk",
        _COMMITS,
        partial(commits.run, library="icechunk", package="icechunk"),
        ("icechunk>=1.1", "zarr>=3.1"),
        workers=2,
    ),
    Suite(
        "deltalake",
        _COMMITS,
        partial(commits.run, library="delta", package="deltalake"),
        ("deltalake>=1.6", "pyarrow"),
        workers=2,
    ),
    Suite(
        "lance",
        _COMMITS,
        partial(commits.run, library="lance", package="pylance"),
        ("pylance>=14", "pyarrow"),
        workers=2,
    ),
    Suite("restic", "backups, checks, restores, forget and prune", many_files.restic),
    Suite("rclone", "sync up and down, checks, purge", many_files.rclone),
)
