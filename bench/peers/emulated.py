"""`python -m bench.peers.emulated LOADER ENDPOINT BUCKET …`: accelerators fed by a peer.

Law: a worker process for each accelerator; records are drawn with replacement, handed over as bytes, and none
is decoded.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from bench.accelerator_threads import run
from bench.peers.loaders import Source, client, keys

TIMES = 200
"""Each record comes about so often in an epoch, so that no trial meets the end of one."""


def whole(records: list[bytes]) -> list[bytes]:
    """Collation: bytes as they are."""
    return records


def connector(source: Source, prefix: str, take: int) -> Any:
    """s3torchconnector, map-style: a GetObject a record, `take` bytes of its array kept."""
    module = import_module("s3torchconnector")

    def read(item: Any) -> bytes:
        body = item.read()
        return bytes(memoryview(body)[128 : 128 + take]) if take else bytes(body)

    dataset = module.S3MapDataset.from_prefix(
        f"s3://{source.bucket}/{prefix}/",
        region="us-east-1",
        endpoint=source.endpoint,
        transform=read,
        s3client_config=module.S3ClientConfig(force_path_style=True),
    )
    sampler = RandomSampler(dataset, replacement=True, num_samples=TIMES * len(dataset))
    return DataLoader(
        dataset, source.batch, sampler=sampler, num_workers=source.workers, collate_fn=whole, drop_last=True
    )


def shards(source: Source, prefix: str, take: int) -> Any:
    """webdataset over tar shards, fetched by curl; a shuffle buffer of 1,000."""
    del take
    wds, s3 = import_module("webdataset"), client(source)
    params = [{"Bucket": source.bucket, "Key": key} for key in keys(source, prefix + "/")]
    urls = [f"pipe:curl -s -f '{s3.generate_presigned_url('get_object', Params=one)}'" for one in params]
    dataset = wds.WebDataset(urls, resampled=True).shuffle(1000).to_tuple("bin")
    dataset = dataset.map(lambda record: record[0]).batched(source.batch, collation_fn=whole, partial=False)
    return wds.WebLoader(dataset, batch_size=None, num_workers=source.workers)


LOADERS = {"s3torchconnector": connector, "webdataset": shards}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loader", choices=sorted(LOADERS))
    parser.add_argument("endpoint")
    parser.add_argument("bucket")
    parser.add_argument("prefix")
    for name in ("--accelerators", "--batch", "--wanted", "--take"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--step", "--seconds"):
        parser.add_argument(name, type=float, required=True)
    given = parser.parse_args()
    source = Source(given.endpoint, given.bucket, given.batch, 1, "")
    made = [LOADERS[given.loader](source, given.prefix, given.take) for _ in range(given.accelerators)]
    run(made, lambda batch: sum(map(len, batch)), given.wanted, given.step, given.seconds)


if __name__ == "__main__":
    main()
