"""One of each kind of thing that a store keeps, and what its clients see of them.

Law: `seen` only asks; a store that has kept everything answers the same, whatever release serves it.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from tests.support.archive_files import archive_of
from tests.support.job_fixtures import done
from tests.support.native_fixtures import CROP, FIELDS, png

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.support.daemons import Daemon

PLAIN, VERSIONED, TRAINING, MADE, BACKED = "plain", "versioned", "training", "made", "backed"
SAMPLES: Final = 24
PART: Final = b"part" * (5 << 18)
"""As small as one may be that is not the last."""
MODULE: Final = b'''
import numpy as np
from meshsdk.userops import image, op

@op(input=image("h", "w", 3), output=image("h", "w", 3), memory=128 << 20)
def brighten(pixels, *, gain: float = 1.5):
    """Pixels times gain."""
    return np.clip(pixels * gain, 0, 255).astype(np.uint8)
'''
_READERS = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{PLAIN}/*"}],
}
_PUBLIC = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": f"arn:aws:s3:::{PLAIN}/public/*",
        }
    ],
}
_LIFECYCLE = {"ID": "r", "Status": "Enabled", "Filter": {"Prefix": "t/"}, "Expiration": {"Days": 9}}
_CORS = {"AllowedMethods": ["GET"], "AllowedOrigins": ["https://a.example"], "MaxAgeSeconds": 7}
_HEADERS = ("ETag", "ContentType", "Metadata", "ChecksumSHA256", "VersionId", "TagCount")
_USER = ("user_id", "display_name", "email", "origin", "policies", "created")
_KEY = ("access_key", "user_id", "name", "enabled", "works", "origin", "policies", "created")
_DECODED: list[dict[str, Any]] = [{"op": "decode"}, {"op": "resize", "args": {"size": 8}}, {"op": "to_npy"}]
_VIEWS: dict[str, dict[str, Any]] = {
    "packed": {"kind": "shards", "prefix": "train/", "count": 9},
    "small": {"kind": "transform", "prefix": "train/", "ops": _DECODED, "match": [".png"], "suffix": ".npy"},
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What of it has no name that a test chose. `uploads`: (key, id, ETag of part 1) by bucket."""

    uploads: Mapping[str, tuple[str, str, str]]
    ann: Mapping[str, str]
    session: Mapping[str, str]
    plan: str
    job: str


def fill(node: Daemon, place: Path) -> Kept:
    """Store them; the origin is a folder at this place."""
    s3 = node.client()
    for bucket in (PLAIN, VERSIONED, TRAINING, MADE):
        s3.create_bucket(Bucket=bucket)
    _fill_plain(s3)
    _fill_versioned(s3)
    (place / "origin").mkdir()
    (place / "origin" / "there").write_bytes(b"there before")
    _ask(node, "PUT", f"/-/buckets/{BACKED}", {"url": f"file://{place}/origin", "write": "through"})
    s3.put_object(Bucket=BACKED, Key="written", Body=b"w" * 3000)
    for number in range(SAMPLES):
        key = f"train/{'cat' if number % 3 else 'dog'}/{number:04}.png"
        s3.put_object(Bucket=TRAINING, Key=key, Body=png(number))
    packed = archive_of("tar", {f"{number:04}.png": png(number) for number in range(10)})
    s3.put_object(Bucket=TRAINING, Key="packed/0.tar", Body=packed)
    ann, session = _add_users(node)
    pushed = node.request("POST", "/-/modules?name=mine", MODULE)
    assert pushed.status == 200, pushed.body
    asked: dict[str, Any] = {"source": f"s3://{TRAINING}/packed/", "fields": {"image": FIELDS["image"]}}
    snapshot = _ask(node, "POST", "/-/snapshots", asked)["snapshot"]
    asked = {"snapshot": snapshot, "spec": {"seed": 7, "ops": CROP}, "batch": 4}
    plan = _ask(node, "POST", "/-/plans", asked)["plan"]
    for name, view in _VIEWS.items():
        _ask(node, "POST", "/-/views", {"bucket": TRAINING, "name": name, "view": view})
    job = done(node, kind="shard", source=f"s3://{TRAINING}/train", target=f"s3://{MADE}/shards", count=10)
    uploads = {bucket: _begin_upload(s3, bucket) for bucket in (PLAIN, VERSIONED)}
    return Kept(uploads, ann, session, plan, job["id"])


def _fill_plain(s3: Any) -> None:
    for number in range(4):
        s3.put_object(Bucket=PLAIN, Key=f"a/{number}", Body=b"text %d" % number)
    s3.put_object(Bucket=PLAIN, Key="public/a", Body=b"for all")
    s3.put_object(Bucket=PLAIN, Key="empty", Body=b"")
    s3.put_object(Bucket=PLAIN, Key="large", Body=b"large" * 300_000)
    about = {"Metadata": {"a": "b"}, "ContentType": "text/x", "Tagging": "t=1", "ChecksumAlgorithm": "SHA256"}
    s3.put_object(Bucket=PLAIN, Key="ünï/ key", Body=b"odd", **about)
    s3.put_object_acl(Bucket=PLAIN, Key="ünï/ key", ACL="public-read")
    s3.copy_object(Bucket=PLAIN, Key="copy", CopySource={"Bucket": PLAIN, "Key": "a/1"})
    s3.delete_object(Bucket=PLAIN, Key="a/3")
    key, upload, etag = _begin_upload(s3, PLAIN, "parts")
    _complete(s3, PLAIN, key, upload, etag)
    s3.put_bucket_policy(Bucket=PLAIN, Policy=json.dumps(_PUBLIC))
    s3.put_bucket_cors(Bucket=PLAIN, CORSConfiguration={"CORSRules": [_CORS]})
    s3.put_bucket_tagging(Bucket=PLAIN, Tagging={"TagSet": [{"Key": "owner", "Value": "ann"}]})


def _fill_versioned(s3: Any) -> None:
    s3.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
    for number in range(3):
        s3.put_object(Bucket=VERSIONED, Key="v", Body=b"v%d" % number)
        s3.put_object(Bucket=VERSIONED, Key="large", Body=b"%d" % number * 900_000)
    s3.delete_object(Bucket=VERSIONED, Key="v")
    s3.put_bucket_lifecycle_configuration(Bucket=VERSIONED, LifecycleConfiguration={"Rules": [_LIFECYCLE]})


def _add_users(node: Daemon) -> tuple[dict[str, str], dict[str, str]]:
    """The key of one who may read, and temporary credentials of root's that may do the same."""
    _ask(node, "PUT", "/-/admin/policies/readers", _READERS)
    for user, policies in (("ann", ["readers"]), ("bob", [])):
        _ask(node, "POST", "/-/admin/users", {"user_id": user, "policies": policies, "email": f"{user}@x.y"})
    key = _ask(node, "POST", "/-/admin/keys", {"user_id": "ann", "name": "first"})
    off = _ask(node, "POST", "/-/admin/keys", {"user_id": "bob"})["access_key"]
    _ask(node, "PATCH", f"/-/admin/keys/{off}", {"enabled": False})
    made = _ask(node, "POST", "/-/sts", {"policy": _READERS})
    ann = {"aws_access_key_id": key["access_key"], "aws_secret_access_key": key["secret_key"]}
    session = {
        "aws_access_key_id": made["AccessKeyId"],
        "aws_secret_access_key": made["SecretAccessKey"],
        "aws_session_token": made["SessionToken"],
    }
    return ann, session


def _begin_upload(s3: Any, bucket: str, key: str = "begun") -> tuple[str, str, str]:
    upload = s3.create_multipart_upload(Bucket=bucket, Key=key, Metadata={"from": "before"})["UploadId"]
    part = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=PART)
    return key, upload, part["ETag"]


def _complete(s3: Any, bucket: str, key: str, upload: str, etag: str) -> None:
    part = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=2, Body=b"last")
    parts = [{"PartNumber": 1, "ETag": etag}, {"PartNumber": 2, "ETag": part["ETag"]}]
    s3.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})


def complete_uploads(node: Daemon, kept: Kept) -> None:
    """Bring the uploads in progress to their end, and see that they are what was sent."""
    s3 = node.client()
    for bucket, upload in kept.uploads.items():
        _complete(s3, bucket, *upload)
        found = s3.get_object(Bucket=bucket, Key=upload[0])
        assert (found["Body"].read() == PART + b"last", found["Metadata"]) == (True, {"from": "before"})
        assert s3.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


def _ask(node: Daemon, method: str, target: str, document: Any = None) -> dict[str, Any]:
    answer = node.request(method, target, b"" if document is None else json.dumps(document).encode())
    assert answer.status < 300, (target, answer.body)
    return dict(json.loads(answer.body))


# --- what clients see --------------------------------------------------------------------------------


def seen(node: Daemon, kept: Kept) -> dict[str, Any]:
    """Everything, by what it is."""
    views = [f"{TRAINING}--{name}" for name in _VIEWS]
    with closing(node.client()) as s3:
        found: dict[str, Any] = {
            f"objects of {bucket}": _objects(s3, bucket)
            for bucket in (PLAIN, VERSIONED, TRAINING, MADE, BACKED, *views)
        }
        for bucket in (PLAIN, VERSIONED):
            found |= {f"{name} of {bucket}": said for name, said in _settings(s3, bucket).items()}
            found[f"versions of {bucket}"] = _versions(s3, bucket)
            found[f"uploads of {bucket}"] = _uploads(s3, bucket)
        created = {each["Name"]: each["CreationDate"] for each in s3.list_buckets()["Buckets"]}
    found["buckets"] = {bucket: created[bucket] for bucket in (PLAIN, VERSIONED, TRAINING, MADE, BACKED)}
    for name, keys in (("ann", kept.ann), ("session", kept.session)):
        with closing(node.client(**keys)) as s3:
            allowed = [_code(s3.get_object, Bucket=PLAIN, Key="a/1"), _code(s3.list_objects_v2, Bucket=MADE)]
            found[f"rights of {name}"] = [*allowed, _code(s3.put_object, Bucket=PLAIN, Key="a/9", Body=b"")]
    found["rights of all"] = [_anonymous(node, f"/{PLAIN}/{key}") for key in ("public/a", "a/1")]
    for user in ("ann", "bob"):
        found[f"user {user}"] = _user(_ask(node, "GET", f"/-/admin/users/{user}"))
    policy = _ask(node, "GET", "/-/admin/policies/readers")
    found["policy"] = {name: value for name, value in policy.items() if name != "roles"}  # a later release's
    modules = _ask(node, "GET", "/-/modules")["modules"]
    found["modules"] = [(module["module"], module["version"]) for module in modules]
    job = _ask(node, "GET", f"/-/jobs/{kept.job}")
    found["job"] = (job["state"], job["kind"], job["progress"])
    frames = [node.request("GET", f"/-/plans/{kept.plan}/{epoch}/1?batch=4") for epoch in (0, 5)]
    found["frames"] = [(frame.status, _digest(frame.body)) for frame in frames]
    return found


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _objects(s3: Any, bucket: str) -> dict[str, Any]:
    """What a listing says of each, and what a GET does. Of a view each node has what it made itself, and
    dates it so."""
    found = {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": 7}):
        for each in page.get("Contents", []):
            got = s3.get_object(Bucket=bucket, Key=each["Key"], ChecksumMode="ENABLED")
            said = [each["Size"], each["ETag"], None if "--" in bucket else each["LastModified"]]
            about = [got.get(name) for name in _HEADERS]
            found[each["Key"]] = [*said, *about, _digest(got["Body"].read())]
    return found


def _versions(s3: Any, bucket: str) -> list[Any]:
    listed = s3.list_object_versions(Bucket=bucket)
    found: list[Any] = []
    for each in listed.get("Versions", []):
        got = s3.get_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])["Body"].read()
        about = [each[name] for name in ("Key", "VersionId", "IsLatest", "ETag", "LastModified")]
        found.append([*about, _digest(got)])
    for each in listed.get("DeleteMarkers", []):
        found.append([each[name] for name in ("Key", "VersionId", "IsLatest", "LastModified")])
    return found


def _uploads(s3: Any, bucket: str) -> list[Any]:
    found = []
    for each in s3.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
        parts = s3.list_parts(Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])["Parts"]
        about = [(part["PartNumber"], part["ETag"], part["Size"], part["LastModified"]) for part in parts]
        found.append((each["Key"], each["UploadId"], each["Initiated"], about))
    return found


def _settings(s3: Any, bucket: str) -> dict[str, Any]:
    """The answers, or the codes of the refusals where a bucket has none."""
    asked: dict[str, Callable[..., Any]] = {
        "policy": s3.get_bucket_policy,
        "lifecycle": s3.get_bucket_lifecycle_configuration,
        "versioning": s3.get_bucket_versioning,
        "cors": s3.get_bucket_cors,
        "tagging": s3.get_bucket_tagging,
    }
    found = {name: _answer(call, Bucket=bucket) for name, call in asked.items()}
    if bucket == PLAIN:
        for name, call in (("tags", s3.get_object_tagging), ("grants", s3.get_object_acl)):
            found[name] = _answer(call, Bucket=bucket, Key="ünï/ key")
    return found


def _answer(call: Callable[..., Any], **asked: Any) -> Any:
    try:
        answer = call(**asked)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}


def _code(call: Callable[..., Any], **asked: Any) -> str:
    answer = _answer(call, **asked)
    return answer if isinstance(answer, str) else "allowed"


def _anonymous(node: Daemon, target: str) -> int:
    with closing(node.connect()) as connection:
        connection.request("GET", target)
        return connection.getresponse().status


def _user(said: Mapping[str, Any]) -> list[Any]:
    """What both releases say of a user and of the keys, but for what changes with each use."""
    keys = [[key[name] for name in _KEY] for key in said["keys"]]
    return [*(said[name] for name in _USER), said["buckets"], keys]
