"""A data directory as it was kept once: today's daemon reads all of it, whatever wrote it.

`GOLDEN=rewrite pytest tests/component/store/test_directory_image.py` writes it anew, for a new format whose
predecessor is still read: keep the old image beside it, then.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fork_server import outcome_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = Path(__file__).parents[2] / "golden" / "directory"
IMAGE, FACTS = PLACE / "node.tar.xz", PLACE / "node.json"
ROOT = {"MESHD_ROOT_ACCESS_KEY": "MESHROOTIMAGE", "MESHD_ROOT_SECRET_KEY": "of-nobody-but-this-test"}
PART = b"part" * (5 << 18)
FIELDS = {"text": {"ext": ["txt"]}}
AGELESS = ("--stale-uploads", "0", "--keep-documents", "0")
"""The image gets older every day; what it has is kept all the same."""
_PASSING = ("run", "view-uses", "clock", "lock", "lock.mdb", "locks")
"""What a daemon makes anew."""


def _posted(daemon: Daemon, method: str, target: str, document: Any) -> dict[str, Any]:
    answer = daemon.request(method, target, json.dumps(document).encode())
    assert answer.status < 300, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def _fill(daemon: Daemon) -> dict[str, Any]:
    """One of each kind of thing that is kept; what of it has no name that the test chose."""
    s3 = daemon.client()
    s3.create_bucket(Bucket="plain")
    for number in range(4):
        s3.put_object(Bucket="plain", Key=f"a/{number}.txt", Body=b"text %d" % number)
    about = {"Metadata": {"a": "b"}, "ContentType": "text/x", "Tagging": "t=1", "ChecksumAlgorithm": "SHA256"}
    s3.put_object(Bucket="plain", Key="ünï/ key", Body=b"odd", **about)
    s3.put_object_acl(Bucket="plain", Key="ünï/ key", ACL="public-read")
    s3.copy_object(Bucket="plain", Key="copy", CopySource={"Bucket": "plain", "Key": "a/1.txt"})
    s3.delete_object(Bucket="plain", Key="a/3.txt")
    parts: dict[str, Any] = {"Bucket": "plain", "Key": "parts"}
    parts["UploadId"] = s3.create_multipart_upload(**parts)["UploadId"]
    tags = [
        {"PartNumber": n, "ETag": s3.upload_part(**parts, PartNumber=n, Body=body)["ETag"]}
        for n, body in ((1, PART), (2, b"last"))
    ]
    s3.complete_multipart_upload(**parts, MultipartUpload={"Parts": tags})
    upload = s3.create_multipart_upload(Bucket="plain", Key="begun")["UploadId"]
    s3.upload_part(Bucket="plain", Key="begun", UploadId=upload, PartNumber=3, Body=b"a part")
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    versions = [s3.put_object(Bucket="versions", Key="v", Body=b"v%d" % n)["VersionId"] for n in range(2)]
    marker = s3.delete_object(Bucket="versions", Key="v")["VersionId"]
    rule = {"ID": "r", "Status": "Enabled", "Filter": {"Prefix": "t/"}, "Expiration": {"Days": 9}}
    s3.put_bucket_lifecycle_configuration(Bucket="versions", LifecycleConfiguration={"Rules": [rule]})
    allow = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::plain/*"}
    _posted(daemon, "PUT", "/-/admin/policies/readers", {"Version": "2012-10-17", "Statement": [allow]})
    _posted(daemon, "POST", "/-/admin/users", {"user_id": "ann", "policies": ["readers"]})
    key = _posted(daemon, "POST", "/-/admin/keys", {"user_id": "ann"})
    asked: dict[str, Any] = {"source": "s3://plain/a/", "fields": FIELDS}
    snapshot = _posted(daemon, "POST", "/-/snapshots", asked)["snapshot"]
    asked = {"snapshot": snapshot, "spec": {"seed": 7, "ops": []}, "batch": 3}
    plan = _posted(daemon, "POST", "/-/plans", asked)["plan"]
    return {
        "upload": upload,
        "versions": versions,
        "marker": marker,
        "key": [key["access_key"], key["secret_key"]],
        "snapshot": snapshot,
        "plan": plan,
        "frame": _frame(daemon, plan),
    }


def _frame(daemon: Daemon, plan: str) -> str:
    answer = daemon.request("GET", f"/-/plans/{plan}/0/0?batch=3")
    assert answer.status == 200, answer.body
    return hashlib.sha256(answer.body).hexdigest()


def _write() -> None:
    with Daemon.start(env=ROOT) as daemon:
        FACTS.write_text(json.dumps(_fill(daemon), indent=1) + "\n")
        daemon.stop()
        with tarfile.open(IMAGE, "w:xz") as image:
            image.add(
                daemon.data_dir,
                "node",
                filter=lambda member: None if Path(member.name).name in _PASSING else member,
            )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    if os.environ.get("GOLDEN") == "rewrite":
        PLACE.mkdir(exist_ok=True)
        _write()
    with tarfile.open(IMAGE) as image:
        image.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's 3.11.2 has none
        image.extractall(tmp_path)
    return tmp_path / "node"


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    with Daemon.start(directory, args=AGELESS, env=ROOT) as running:
        yield running


def test_what_was_kept_then_is_read_now(daemon: Daemon) -> None:
    facts, s3 = json.loads(FACTS.read_text()), daemon.client()
    listed = [each["Key"] for each in s3.list_objects_v2(Bucket="plain")["Contents"]]
    assert listed == ["a/0.txt", "a/1.txt", "a/2.txt", "copy", "parts", "ünï/ key"]
    assert s3.get_object(Bucket="plain", Key="copy")["Body"].read() == b"text 1"
    odd = s3.get_object(Bucket="plain", Key="ünï/ key", ChecksumMode="ENABLED")
    assert (odd["Body"].read(), odd["Metadata"], odd["ContentType"]) == (b"odd", {"a": "b"}, "text/x")
    assert odd["ChecksumSHA256"]
    assert s3.get_object_tagging(Bucket="plain", Key="ünï/ key")["TagSet"] == [{"Key": "t", "Value": "1"}]
    assert len(s3.get_object_acl(Bucket="plain", Key="ünï/ key")["Grants"]) == 2
    assert s3.get_object(Bucket="plain", Key="parts", PartNumber=2)["Body"].read() == b"last"
    assert s3.get_object(Bucket="plain", Key="parts")["Body"].read() == PART + b"last"
    parts: dict[str, Any] = {"Bucket": "plain", "Key": "begun", "UploadId": facts["upload"]}
    (part,) = s3.list_parts(**parts)["Parts"]
    done = {"Parts": [{"PartNumber": 3, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(**parts, MultipartUpload=done)
    assert s3.get_object(Bucket="plain", Key="begun")["Body"].read() == b"a part"
    history = s3.list_object_versions(Bucket="versions")
    assert [each["VersionId"] for each in history["DeleteMarkers"]] == [facts["marker"]]
    for number, version in enumerate(facts["versions"]):
        found = s3.get_object(Bucket="versions", Key="v", VersionId=version)
        assert found["Body"].read() == b"v%d" % number
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket="versions")["Rules"]
    assert rule["Expiration"] == {"Days": 9}
    access, secret = facts["key"]
    ann = daemon.client(aws_access_key_id=access, aws_secret_access_key=secret)
    assert ann.get_object(Bucket="plain", Key="a/0.txt")["Body"].read() == b"text 0"
    assert daemon.request("GET", f"/-/snapshots/{facts['snapshot']}").status == 200
    assert _frame(daemon, facts["plan"]) == facts["frame"]


def test_the_data_files_of_then_are_sound_and_tell_all(directory: Path) -> None:
    for arguments in (["--rebuild"], []):
        done = outcome_of("fsck", "--data-dir", str(directory), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    with Daemon.start(directory, env=ROOT) as daemon:
        found = daemon.client().list_objects_v2(Bucket="plain")["KeyCount"]
        assert found == 6


def test_a_directory_of_a_later_format_is_refused_and_left_alone(directory: Path) -> None:
    marker = directory / "extents" / "DISK"
    later = json.dumps(json.loads(marker.read_bytes()) | {"format": 2}).encode()
    marker.write_bytes(later)
    with pytest.raises(
        DaemonFailedError, match=r"written by a newer meshd \(format 2, not 1\); upgrade meshd"
    ):
        Daemon.start(directory, env=ROOT)
    assert marker.read_bytes() == later
