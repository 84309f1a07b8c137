"""Any sequence of verbs on a versioned bucket leaves what a few lines of Python say it leaves."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = ("k", "k/1", "k2")
keys = st.sampled_from(KEYS)
bodies = st.binary(max_size=8)
picks = st.integers(0, 3)  # which version of a key, from the newest


@dataclass
class Version:
    id: str
    body: bytes = b""
    tags: dict[str, str] = field(default_factory=dict)
    marker: bool = False


class Bucket(RuleBasedStateMachine):
    """`past` has the versions of each key, the newest first."""

    s3: Any

    @initialize(first=st.sampled_from(["Enabled", "", "Suspended"]))
    def make(self, first: str) -> None:
        self.name = f"model-{uuid.uuid4().hex[:16]}"
        self.s3.create_bucket(Bucket=self.name)
        self.past: dict[str, list[Version]] = {key: [] for key in KEYS}
        self.setting = ""
        if first:
            self.set_versioning(first)

    def teardown(self) -> None:
        for key, versions in self.past.items():
            for version in versions:
                self.s3.delete_object(Bucket=self.name, Key=key, VersionId=version.id)
        self.s3.delete_bucket(Bucket=self.name)  # which also shows that nothing is left

    # what the model does ----------------------------------------------------------------------------

    def current(self, key: str) -> Version | None:
        versions = self.past[key]
        return versions[0] if versions and not versions[0].marker else None

    def add(self, key: str, version: Version) -> None:
        if version.id == "null":
            self.past[key] = [old for old in self.past[key] if old.id != "null"]
        self.past[key].insert(0, version)

    def named(self, key: str, pick: int) -> Version | None:
        versions = self.past[key]
        return versions[pick] if pick < len(versions) else None

    def wrote(self, key: str, answer: dict[str, Any], body: bytes, tags: dict[str, str]) -> None:
        assert ("VersionId" in answer) == (self.setting == "Enabled")
        self.add(key, Version(answer.get("VersionId", "null"), body, tags))

    # what is done ---------------------------------------------------------------------------------------

    @rule(setting=st.sampled_from(["Enabled", "Suspended"]))
    def set_versioning(self, setting: str) -> None:
        self.s3.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": setting})
        self.setting = setting

    @rule(key=keys, body=bodies, tags=st.dictionaries(st.sampled_from("ab"), st.sampled_from("12")))
    def put(self, key: str, body: bytes, tags: dict[str, str]) -> None:
        header = "&".join(f"{name}={value}" for name, value in tags.items())
        answer = self.s3.put_object(Bucket=self.name, Key=key, Body=body, Tagging=header)
        self.wrote(key, answer, body, tags)

    @rule(key=keys, body=bodies)
    def put_in_parts(self, key: str, body: bytes) -> None:
        where = {"Bucket": self.name, "Key": key}
        where["UploadId"] = self.s3.create_multipart_upload(**where)["UploadId"]
        part = self.s3.upload_part(PartNumber=7, Body=body, **where)
        parts = {"Parts": [{"PartNumber": 7, "ETag": part["ETag"]}]}
        self.wrote(key, self.s3.complete_multipart_upload(MultipartUpload=parts, **where), body, {})

    @rule(source=keys, pick=picks, key=keys)
    def copy(self, source: str, pick: int, key: str) -> None:
        version = self.named(source, pick)
        if version is None or version.marker or (source == key and not self.setting):
            return
        where = {"Bucket": self.name, "Key": source, "VersionId": version.id}
        answer = self.s3.copy_object(Bucket=self.name, Key=key, CopySource=where)
        assert answer.get("CopySourceVersionId") == (version.id if self.setting else None)
        self.wrote(key, answer, version.body, version.tags)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        answer = self.s3.delete_object(Bucket=self.name, Key=key)
        assert answer.get("DeleteMarker", False) == bool(self.setting)
        if self.setting:
            self.add(key, Version(answer["VersionId"], marker=True))
        else:
            self.past[key] = []

    @rule(key=keys, pick=picks)
    def delete_version(self, key: str, pick: int) -> None:
        version = self.named(key, pick)
        if version is not None:
            answer = self.s3.delete_object(Bucket=self.name, Key=key, VersionId=version.id)
            assert (answer["VersionId"], answer.get("DeleteMarker", False)) == (version.id, version.marker)
            self.past[key].remove(version)

    @precondition(lambda self: self.setting)
    @rule(plain=keys, key=keys, pick=picks)
    def delete_many(self, plain: str, key: str, pick: int) -> None:
        version = self.named(key, pick)
        if version is None or plain == key:
            return
        objects = [{"Key": plain}, {"Key": key, "VersionId": version.id}]
        made, gone = self.s3.delete_objects(Bucket=self.name, Delete={"Objects": objects})["Deleted"]
        self.add(plain, Version(made["DeleteMarkerVersionId"], marker=True))
        assert (gone["VersionId"], gone.get("DeleteMarker", False)) == (version.id, version.marker)
        self.past[key].remove(version)

    @rule(key=keys, pick=picks, value=st.sampled_from("12"))
    def tag(self, key: str, pick: int, value: str) -> None:
        version = self.named(key, pick)
        if version is not None and not version.marker:
            tagging = {"TagSet": [{"Key": "t", "Value": value}]}
            self.s3.put_object_tagging(Bucket=self.name, Key=key, VersionId=version.id, Tagging=tagging)
            version.tags = {"t": value}

    # what is seen ---------------------------------------------------------------------------------------

    @invariant()
    def current_objects_are_read_and_listed(self) -> None:
        listed = [entry["Key"] for entry in self.s3.list_objects_v2(Bucket=self.name).get("Contents", [])]
        assert listed == [key for key in sorted(KEYS) if self.current(key)]
        for key in KEYS:
            version = self.current(key)
            if version is None:
                hidden = bool(self.past[key])
                headers = refused(self.s3.get_object, Bucket=self.name, Key=key)
                assert headers.get("x-amz-delete-marker") == ("true" if hidden else None)
            else:
                got = self.s3.get_object(Bucket=self.name, Key=key)
                assert got["Body"].read() == version.body
                assert got.get("VersionId") == (version.id if self.setting else None)
                assert got.get("TagCount", 0) == len(version.tags)

    @invariant()
    def versions_are_listed_in_order(self) -> None:
        pages = self.s3.get_paginator("list_object_versions").paginate(
            Bucket=self.name, PaginationConfig={"PageSize": 3}
        )
        found: dict[str, list[tuple[str, bool, bool]]] = {}
        for page in pages:
            for kind, marker in (("Versions", False), ("DeleteMarkers", True)):
                for entry in page.get(kind, []):
                    told = (entry["VersionId"], entry["IsLatest"], marker)
                    found.setdefault(entry["Key"], []).append(told)
        expected = {
            key: [(v.id, at == 0, v.marker) for at, v in enumerate(versions)]
            for key, versions in self.past.items()
            if versions
        }
        assert {key: sorted(entries) for key, entries in found.items()} == {
            key: sorted(entries) for key, entries in expected.items()
        }

    @rule(key=keys, pick=picks)
    def read_version(self, key: str, pick: int) -> None:
        version = self.named(key, pick)
        if version is None:
            return
        where = {"Bucket": self.name, "Key": key, "VersionId": version.id}
        if version.marker:
            assert refused(self.s3.get_object, **where)["x-amz-version-id"] == version.id
            return
        assert self.s3.get_object(**where)["Body"].read() == version.body
        tags = {tag["Key"]: tag["Value"] for tag in self.s3.get_object_tagging(**where)["TagSet"]}
        assert tags == version.tags


def refused(call: Callable[..., Any], **options: Any) -> dict[str, str]:
    """The headers of a refusal."""
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    headers: dict[str, str] = excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]
    return headers


def test_the_model_holds(s3: Any) -> None:
    machine = type("BoundBucket", (Bucket,), {"s3": s3})
    run_machine(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=15,
            deadline=None,
            phases=[Phase.reuse, Phase.generate],  # over HTTP, shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
