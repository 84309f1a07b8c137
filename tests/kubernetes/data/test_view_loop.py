"""MeshView: its loop against a real API server and a real daemon; killed at every call it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from tests.kubernetes.data.operating import bucket_of, condition, killed_at_every_call, view
from tests.kubernetes.dying import Calls, DiedError
from tests.kubernetes.test_webhook import until

if TYPE_CHECKING:
    from tests.kubernetes.data.operating import Operator


def test_a_view_is_made_replaced_and_removed(operator: Operator) -> None:
    name = bucket_of(operator)
    operator.make("MeshView", "small", view(name, 64))
    operator.look("MeshView", "small")
    status = operator.status("MeshView", "small")
    assert condition(status, "Ready")[:2] == ("False", "NoSuchBucket")
    operator.daemon.client().create_bucket(Bucket=name)
    operator.look("MeshView", "small")
    status = operator.status("MeshView", "small")
    assert (status["ready"], status["address"]) == (True, f"{name}--small")
    assert {each["op"] for each in status["opBuilds"]} == {"decode", "resize", "encode"}
    image = cv2.imencode(".png", np.zeros((80, 80, 3), np.uint8))[1].tobytes()
    operator.daemon.client().put_object(Bucket=name, Key="a.png", Body=image)
    for _ in range(4):
        operator.daemon.client().get_object(Bucket=f"{name}--small", Key="a.png")["Body"].read()
    operator.daemons._metrics.clear()  # told again for half a minute
    operator.until("MeshView", "small", lambda found: found["hitPercent"] == 75)
    operator.change("MeshView", "small", {"spec": view(name, 32)})
    operator.look("MeshView", "small")
    assert operator.ear.heard[-1][0] == "ViewReplaced"
    made = operator.ask("GET", f"/-/views/{name}--small")["view"]
    assert made["ops"][1]["args"]["size"] == 32
    operator.make("MeshView", "other", view(name, 48) | {"name": "small"})
    operator.look("MeshView", "other")  # not this one's
    assert condition(operator.status("MeshView", "other"), "Ready")[:2] == ("False", "ViewExists")
    for each in ("other", "small"):
        operator.delete("MeshView", each)
        operator.look("MeshView", each)
        assert operator.gone("MeshView", each)
    assert operator.ask("GET", f"/-/views/{name}--small") == 404


def test_the_module_of_a_view_is_pushed(operator: Operator) -> None:
    name = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=name)
    source = "import shardmesh_op\n"
    spec = view(name, 64) | {"module": {"configMapRef": {"name": "ops"}, "name": "mine"}}
    operator.make("MeshView", "own", spec)
    operator.look("MeshView", "own")
    assert "ConfigMap 'ops' does not exist" in condition(operator.status("MeshView", "own"), "Ready")[2]
    metadata = ObjectMeta(name="ops", namespace=operator.namespace)
    operator.kube.create(ConfigMap(metadata=metadata, data={"mine.py": source}))
    operator.look("MeshView", "own")
    assert condition(operator.status("MeshView", "own"), "Ready")[0] == "False"  # no module of ops
    assert "shardmesh_op" in condition(operator.status("MeshView", "own"), "Ready")[2]


def test_views_converge_wherever_the_operator_dies(operator: Operator) -> None:
    bucket = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=bucket)

    def make(name: str) -> None:
        operator.make("MeshView", name, view(bucket, 64))

    killed_at_every_call(operator, "MeshView", make, lambda found: found.get("ready"), 24)
    assert operator.ask("GET", f"/-/views?bucket={bucket}")["views"] == []


def test_a_view_is_removed_although_no_operator_ran_since_it_was_created(operator: Operator) -> None:
    """The operator dies at one call after the other; the MeshView is deleted before another one starts."""
    bucket = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=bucket)
    unrecorded = 0
    for at in range(1, 25):
        name, calls = f"k{at}", Calls(at)
        operator.make("MeshView", name, view(bucket, 64))
        try:
            operator.look("MeshView", name, calls)
            ended = True
        except DiedError:
            ended = False
        made = operator.ask("GET", f"/-/views?bucket={bucket}")["views"]
        unrecorded += bool(made) and not operator.status("MeshView", name).get("address")
        operator.delete("MeshView", name)
        until(lambda name=name: operator.look("MeshView", name) is None)  # type: ignore[misc]
        assert operator.gone("MeshView", name)
        assert operator.ask("GET", f"/-/views?bucket={bucket}")["views"] == [], f"killed at call {at}"
        if ended:
            break
    assert ended, "there are more calls than were tried"
    assert unrecorded > 0, "no kill came between the view and the status"


def test_a_view_of_others_stays_when_a_meshview_of_its_name_is_deleted(operator: Operator) -> None:
    bucket = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=bucket)
    operator.make("MeshView", "first", view(bucket, 64) | {"name": "shared"})
    operator.look("MeshView", "first")
    operator.make("MeshView", "second", view(bucket, 48) | {"name": "shared"})
    operator.look("MeshView", "second")
    operator.delete("MeshView", "second")
    operator.look("MeshView", "second")
    assert operator.gone("MeshView", "second")
    assert operator.ask("GET", f"/-/views/{bucket}--shared")["name"] == f"{bucket}--shared"


def test_a_renamed_view_leaves_none_of_its_former_name(operator: Operator) -> None:
    bucket = bucket_of(operator)
    operator.daemon.client().create_bucket(Bucket=bucket)
    operator.make("MeshView", "small", view(bucket, 64))
    operator.look("MeshView", "small")
    operator.change("MeshView", "small", {"spec": {"name": "tiny"}})
    operator.look("MeshView", "small")
    assert operator.ear.heard[-1][0] == "ViewReplaced"
    assert operator.status("MeshView", "small")["address"] == f"{bucket}--tiny"
    views = operator.ask("GET", f"/-/views?bucket={bucket}")["views"]
    assert [each["name"] for each in views] == [f"{bucket}--tiny"]
