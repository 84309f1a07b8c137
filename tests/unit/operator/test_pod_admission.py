"""What the webhook does to pods."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from meshoperator.planners.pod_admission import (
    ANNOTATION,
    DONE,
    INJECT,
    KEYS,
    LABEL,
    MOUNT,
    REQUIRE,
    ROLE,
    SECRET,
    TOKEN_MOUNT,
    TOKEN_VOLUME,
    VOLUME,
    Admitted,
    DatasetInfo,
    admit,
    credentials_policy,
    requested_datasets,
)

PHOTOS = DatasetInfo("photos", "photos.1a", "http://mesh-s3.ns.svc:9000", "photos")
WORDS = DatasetInfo("words", "words.2b", "http://mesh-s3.ns.svc:9000", "texts", "words/")
FAR = DatasetInfo("far", "far.3c", "http://other-s3.ns.svc:9000", "far")
KNOWN = {each.name: each for each in (PHOTOS, WORDS, FAR)}


def pod(datasets: str = "photos", annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"labels": {LABEL: datasets}, "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "train", "image": "i"}]} | spec}


def patched(document: dict[str, Any], admitted: Admitted) -> dict[str, Any]:
    """RFC 6902's `add` to members, which is all that is used."""
    found = copy.deepcopy(document)
    for operation in admitted.operations:
        assert operation["op"] == "add"
        *way, last = operation["path"].strip("/").split("/")
        inner: Any = found
        for step in way:
            inner = inner[int(step)] if isinstance(inner, list) else inner[step]
        inner[last] = operation["value"]
    return found


def done(document: dict[str, Any]) -> dict[str, Any]:
    return patched(document, admit(document, KNOWN, "t0"))


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container.get("env", ())}


def test_a_pod_is_drawn_to_its_data_and_gets_endpoint_and_keys() -> None:
    found = done(pod(initContainers=[{"name": "first"}]))
    preferred = found["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(term["weight"], term["preference"]["matchExpressions"][0]["key"]) for term in preferred] == [
        (100, "host.shardmesh.io/photos.1a"),
        (60, "rack.shardmesh.io/photos.1a"),
        (30, "zone.shardmesh.io/photos.1a"),
    ]
    for container in (*found["spec"]["containers"], *found["spec"]["initContainers"]):
        assert environment(container) == {
            "MESH_DATASETS": "photos",
            "MESH_DATASET_URIS": "s3://photos/",
            "MESH_ENDPOINT": "http://mesh-s3.ns.svc:9000",
            "AWS_ENDPOINT_URL_S3": "http://mesh-s3.ns.svc:9000",
            "MESH_CREDENTIALS_FILE": f"{MOUNT}/credentials.json",
            "AWS_CONFIG_FILE": f"{MOUNT}/config",
        }
        assert container["volumeMounts"] == [{"name": VOLUME, "mountPath": MOUNT, "readOnly": True}]
    (volume,) = found["spec"]["volumes"]
    assert volume["secret"]["secretName"] == found["metadata"]["annotations"][SECRET] == "shardmesh-t0"
    assert found["metadata"]["annotations"][DONE] == "photos"


def test_done_twice_is_done_once() -> None:
    once = done(pod())
    assert admit(once, KNOWN, "t1") == Admitted()


def test_several_datasets_are_anded_where_they_are_required() -> None:
    theirs = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a"]}]},
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
                ]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 7, "preference": {}}],
        },
        "podAntiAffinity": {"x": 1},
    }
    document = pod("photos.words", {REQUIRE: "true"}, affinity=theirs)
    found = done(document)["spec"]["affinity"]
    assert found["podAntiAffinity"] == {"x": 1}
    node = found["nodeAffinity"]
    terms = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    ours = [
        {"key": "host.shardmesh.io/photos.1a", "operator": "Exists"},
        {"key": "host.shardmesh.io/words.2b", "operator": "Exists"},
    ]
    assert [term["matchExpressions"][-2:] for term in terms] == [ours, ours]
    assert terms[0]["matchExpressions"][0]["key"] == "gpu"
    assert terms[1]["matchFields"]
    weights = [term["weight"] for term in node["preferredDuringSchedulingIgnoredDuringExecution"]]
    assert weights == [7, 100, 60, 30, 100, 60, 30]


@pytest.mark.parametrize(
    ("container", "absent"),
    [
        ({"env": [{"name": "MESH_ENDPOINT", "value": "mine"}]}, {"MESH_ENDPOINT"}),
        (
            {"env": [{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}]},
            {"MESH_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_SECRET_ACCESS_KEY"},
        ),
        ({"env": [{"name": "AWS_PROFILE", "value": "mine"}]}, {"AWS_CONFIG_FILE", "MESH_CREDENTIALS_FILE"}),
        ({"envFrom": [{"secretRef": {"name": "mine"}}]}, {"AWS_CONFIG_FILE", "AWS_ENDPOINT_URL_S3"}),
    ],
)
def test_what_users_set_stays(container: dict[str, Any], absent: set[str]) -> None:
    document = pod(annotations={KEYS: "environment"}, containers=[{"name": "train", **container}])
    (found,) = done(document)["spec"]["containers"]
    assert found["env"][: len(container.get("env", ()))] == container.get("env", [])
    added = {each["name"] for each in found["env"][len(container.get("env", ())) :]}
    assert not added & absent


def test_volumes_and_mounts_of_users_stay() -> None:
    mine = {"name": "data", "mountPath": MOUNT}
    found = done(pod(volumes=[{"name": "data"}], containers=[{"name": "a", "volumeMounts": [mine]}]))
    assert found["spec"]["containers"][0]["volumeMounts"] == [mine]
    assert [each["name"] for each in found["spec"]["volumes"]] == ["data", VOLUME]


def test_keys_as_variables_only_when_asked_for() -> None:
    (found,) = done(pod(annotations={KEYS: "environment"}))["spec"]["containers"]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"] for each in found["env"] if "valueFrom" in each
    }
    assert set(references) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    assert {each["name"] for each in references.values()} == {"shardmesh-t0"}


def test_less_is_injected_when_so_asked() -> None:
    only_mesh = done(pod(annotations={INJECT: "mesh"}))["spec"]["containers"][0]
    assert not any(name.startswith("AWS_") for name in environment(only_mesh))
    nothing = done(pod(annotations={INJECT: "none"}))["spec"]
    assert nothing["containers"] == [{"name": "train", "image": "i"}]
    assert "affinity" in nothing


def test_what_is_not_known_is_told_and_left_out() -> None:
    admitted = admit(pod("photos.phtos"), KNOWN, "t")
    assert "no MeshDataset 'phtos' is available in this namespace" in admitted.warnings[0]
    assert patched(pod("photos.phtos"), admitted)["metadata"]["annotations"][DONE] == "photos"
    assert admit(pod("phtos"), KNOWN, "t").operations == ()
    assert admit({"metadata": {}, "spec": {}}, KNOWN, "t") == Admitted()


def test_datasets_of_several_meshes_give_no_endpoint() -> None:
    document = pod(annotations={ANNOTATION: "photos, far"})
    assert requested_datasets(document) == ("photos", "far")
    admitted = admit(document, KNOWN, "t")
    found = patched(document, admitted)
    assert "several meshes" in admitted.warnings[0]
    assert "env" not in found["spec"]["containers"][0]
    assert len(found["spec"]["affinity"]["nodeAffinity"].popitem()[1]) == 6


def test_credentials_are_confined_to_the_datasets() -> None:
    statements = credentials_policy([PHOTOS, WORDS])["Statement"]
    assert statements[0]["Resource"] == ["arn:aws:s3:::photos/*", "arn:aws:s3:::photos--*/*"]
    assert statements[2]["Resource"] == ["arn:aws:s3:::texts/words/*"]
    assert statements[3]["Condition"] == {"StringLike": {"s3:prefix": "words/*"}}
    assert {each["Action"] for each in statements} == {"s3:GetObject", "s3:ListBucket"}


TRUSTING = {"photos": replace(PHOTOS, audience="shardmesh.io", token_seconds=3600)}


def test_a_pod_with_a_role_gets_a_token_instead_of_keys() -> None:
    document = pod(annotations={ROLE: "trainer"})
    admitted = admit(document, TRUSTING, "t0")
    assert not admitted.warnings
    found = patched(document, admitted)
    assert SECRET not in found["metadata"]["annotations"]
    (container,) = found["spec"]["containers"]
    assert environment(container) == {
        "MESH_DATASETS": "photos",
        "MESH_DATASET_URIS": "s3://photos/",
        "MESH_ENDPOINT": PHOTOS.endpoint,
        "AWS_ENDPOINT_URL_S3": PHOTOS.endpoint,
        "AWS_ENDPOINT_URL_STS": PHOTOS.endpoint,
        "AWS_ROLE_ARN": "arn:aws:iam:::role/trainer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": f"{TOKEN_MOUNT}/token",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    assert container["volumeMounts"] == [{"name": TOKEN_VOLUME, "mountPath": TOKEN_MOUNT, "readOnly": True}]
    (volume,) = found["spec"]["volumes"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"] == {
        "audience": "shardmesh.io",
        "expirationSeconds": 3600,
        "path": "token",
    }
    assert admit(found, TRUSTING, "t1") == Admitted()


def test_keys_of_a_container_come_before_a_role() -> None:
    own = {"name": "train", "env": [{"name": "AWS_ACCESS_KEY_ID", "value": "A"}]}
    document = pod(annotations={ROLE: "trainer"}, containers=[own])
    (container,) = patched(document, admit(document, TRUSTING, "t0"))["spec"]["containers"]
    assert "AWS_ROLE_ARN" not in environment(container)
    assert environment(container)["AWS_ENDPOINT_URL_S3"] == PHOTOS.endpoint


@pytest.mark.parametrize(
    ("known", "annotations", "told"),
    [
        (KNOWN, {ROLE: "trainer"}, "webIdentity"),
        (TRUSTING, {ROLE: "../trainer"}, "name of a role"),
        (TRUSTING, {ROLE: "trainer", INJECT: "mesh"}, "inject"),
        ({"photos": replace(TRUSTING["photos"], tls=True)}, {ROLE: "trainer"}, "TLS"),
    ],
)
def test_without_a_usable_role_the_pod_gets_keys(
    known: dict[str, DatasetInfo], annotations: dict[str, str], told: str
) -> None:
    document = pod(annotations=annotations)
    admitted = admit(document, known, "t0")
    assert [told in warning for warning in admitted.warnings] == [True]
    found = patched(document, admitted)
    assert found["metadata"]["annotations"][SECRET] == "shardmesh-t0"
    assert "AWS_ROLE_ARN" not in environment(found["spec"]["containers"][0])
