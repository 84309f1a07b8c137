"""zarr 3 over s3fs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import s3fs
from driving import serve
from zarr.core.sync import sync
from zarr.storage import FsspecStore
from zarr_driver import Zarr

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zarr.abc.store import Store


class ZarrOverS3fs(Zarr):
    name = "zarr over s3fs"

    def store(self, bucket: str) -> Store:
        filesystem = s3fs.S3FileSystem(
            key=self.endpoint.access_key,
            secret=self.endpoint.secret_key,
            endpoint_url=self.endpoint.url,
            client_kwargs={"region_name": self.endpoint.region, "verify": self.endpoint.ca or None},
            use_listings_cache=False,
            asynchronous=True,
        )
        return FsspecStore(filesystem, path=bucket)

    def run_in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return sync(work)


if __name__ == "__main__":
    serve(ZarrOverS3fs)
