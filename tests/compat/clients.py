"""The clients of the compatibility suite: one line each, and a driver in `drivers/`.

Law: data. A client whose `home` is "dev" is installed with the development tools and runs in `make test`; the
others have an environment of their own under `.venv-compat/`, which `make compat` builds. One that is `slow`
runs there only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEV = "dev"


@dataclass(frozen=True, slots=True)
class Client:
    """`driver` is a file in `drivers/`; `untrusting` says why it cannot be shown a certificate authority."""

    name: str
    driver: str
    home: str = DEV
    untrusting: str = ""
    slow: bool = False


CLIENTS = (
    Client("boto3", "boto3_driver.py"),
    Client("awscli", "awscli_driver.py", slow=True),
    Client("s5cmd", "s5cmd_driver.py"),
    Client("rclone", "rclone_driver.py"),
    Client("s3cmd", "s3cmd_driver.py", "s3cmd"),
    Client("minio-py", "minio_driver.py"),
    Client("obstore", "obstore_driver.py"),
    Client("zarr over obstore", "zarr_obstore_driver.py"),
    Client("tensorstore", "tensorstore_driver.py"),
    Client("s3torchconnector", "s3torch_driver.py"),
    Client("s3fs", "s3fs_driver.py", "s3fs"),
    Client("zarr over s3fs", "zarr_s3fs_driver.py", "s3fs"),
    Client("pyarrow", "pyarrow_driver.py", "tables"),
    Client("duckdb", "duckdb_driver.py", "tables"),
    Client("@aws-sdk/client-s3", "awssdk_driver.mjs", "node"),
)

# What each environment installs. botocore's pins keep s3fs apart from awscli.
HOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "s3fs": ("s3fs", "zarr>=3.1"),
        "s3cmd": ("s3cmd",),
        "tables": ("pyarrow", "duckdb", "duckdb-extensions", "duckdb-extension-httpfs"),
        "node": ("@aws-sdk/client-s3", "@aws-sdk/lib-storage", "@aws-sdk/s3-request-presigner"),
    }
)
