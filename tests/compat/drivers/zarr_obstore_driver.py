"""zarr 3 over obstore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driving import serve
from obstore.store import S3Store
from zarr.storage import ObjectStore
from zarr_driver import Zarr

if TYPE_CHECKING:
    from zarr.abc.store import Store


class ZarrOverObstore(Zarr):
    name = "zarr over obstore"

    def store(self, bucket: str) -> Store:
        return ObjectStore(
            S3Store(
                bucket,
                endpoint=self.endpoint.url,
                access_key_id=self.endpoint.access_key,
                secret_access_key=self.endpoint.secret_key,
                region=self.endpoint.region,
                client_options={"allow_http": not self.endpoint.secure},
                retry_config={"max_retries": 0},
            )
        )


if __name__ == "__main__":
    serve(ZarrOverObstore)
