"""Work for a node that leaves something in every metric of the dashboards."""

from __future__ import annotations

import cv2
import numpy as np

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import jobs
from meshsdk.admin.views import create_view, transform_view
from meshsdk.client.gather import Item


def work(endpoint: str, access_key: str, secret_key: str) -> None:
    """Objects, batches with a bad sample among them, a view, a gather, a job."""
    with mesh.connect(endpoint, access_key=access_key, secret_key=secret_key) as client:
        client.create_bucket("photos")
        for number in range(24):
            image = cv2.imencode(".jpg", np.full((48, 48, 3), number * 10, np.uint8))[1].tobytes()
            client.put("photos", f"train/cat/{number:02}.jpg", image if number else image[:200])
        ds = mesh.open("s3://photos/train", fields={"image": "jpg", "label": "@class"}, client=client)
        ds = ds.map(ops.decode("image"), ops.center_crop("image", 32))
        with mesh.Loader(ds, 8, output="numpy", report="resnet50", max_bad=1.0) as loader:
            assert sum(batch.rows for batch in loader) == 24
        crops = ds.map(ops.random_crop("image", 16))
        with mesh.Loader(crops, 8, output="numpy", max_bad=1.0) as loader:
            for _ in range(2):  # the second epoch may begin with what the first one decoded
                assert sum(batch.rows for batch in loader) == 24
        create_view(
            client.transport,
            "photos",
            "small",
            transform_view([{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]),
        )
        for _ in range(2):
            assert client.get("photos--small", "train/cat/05.jpg")
        list(client.gather([Item("photos", "train/cat/03.jpg")]))
        job = jobs.start_job(
            client.transport, jobs.shard_job("s3://photos/train/", "s3://photos/shards/", count=10)
        )
        assert jobs.wait_for_job(client.transport, job.id).state == "done"
