"""Every 412 says which condition did not hold, as S3 does: s3fs makes FileExistsError of it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.support.s3_raw import read_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from tests.support.s3_raw import Wire


def condition_of(call: Callable[..., Any], **how: Any) -> str:
    """The condition that the 412 of a call names."""
    with pytest.raises(ClientError) as excinfo:
        call(**how)
    error = excinfo.value.response["Error"]
    assert error["Code"] == "PreconditionFailed"
    return str(error.get("Condition"))


@pytest.fixture
def there(s3: Any, bucket: str) -> Mapping[str, Any]:
    """An object: the arguments that name it, its ETag, and when it was stored."""
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"1")["ETag"]
    modified = s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    return {"name": {"Bucket": bucket, "Key": "k"}, "etag": etag, "modified": modified}


def test_reads(s3: Any, there: Mapping[str, Any]) -> None:
    earlier: datetime = there["modified"] - timedelta(hours=1)
    other = {"IfMatch": '"other"', "IfUnmodifiedSince": earlier, "IfNoneMatch": there["etag"]}
    assert condition_of(s3.get_object, **there["name"], IfMatch='"other"') == "If-Match"
    assert condition_of(s3.get_object, **there["name"], IfUnmodifiedSince=earlier) == "If-Unmodified-Since"
    assert condition_of(s3.get_object, **there["name"], **other) == "If-Match"


def test_writes_and_deletions(s3: Any, there: Mapping[str, Any]) -> None:
    name = there["name"]
    assert condition_of(s3.put_object, **name, Body=b"2", IfNoneMatch="*") == "If-None-Match"
    assert condition_of(s3.put_object, **name, Body=b"2", IfMatch='"other"') == "If-Match"
    assert condition_of(s3.delete_object, **name, IfMatch='"other"') == "If-Match"


def test_completions(s3: Any, there: Mapping[str, Any]) -> None:
    upload = {**there["name"], "UploadId": s3.create_multipart_upload(**there["name"])["UploadId"]}
    etag = s3.upload_part(**upload, PartNumber=1, Body=b"2")["ETag"]
    parts = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etag}]}}
    complete = s3.complete_multipart_upload
    assert condition_of(complete, **upload, **parts, IfNoneMatch="*") == "If-None-Match"
    assert condition_of(complete, **upload, **parts, IfMatch='"other"') == "If-Match"


@pytest.mark.parametrize("part", [False, True])
def test_sources_of_copies(s3: Any, there: Mapping[str, Any], part: bool) -> None:
    copy, how = s3.copy_object, {**there["name"], "Key": "copy", "CopySource": there["name"]}
    if part:
        how["UploadId"] = s3.create_multipart_upload(Bucket=how["Bucket"], Key="copy")["UploadId"]
        copy, how["PartNumber"] = s3.upload_part_copy, 1
    hour = timedelta(hours=1)
    for asked, named in (
        ({"CopySourceIfMatch": '"other"'}, "If-Match"),
        ({"CopySourceIfNoneMatch": there["etag"]}, "If-None-Match"),
        ({"CopySourceIfUnmodifiedSince": there["modified"] - hour}, "If-Unmodified-Since"),
        ({"CopySourceIfModifiedSince": there["modified"]}, "If-Modified-Since"),
    ):
        assert condition_of(copy, **how, **asked) == f"x-amz-copy-source-{named}"


def test_targets_of_copies(s3: Any, there: Mapping[str, Any]) -> None:
    s3.put_object(**{**there["name"], "Key": "new"}, Body=b"2")
    how = {**there["name"], "CopySource": {**there["name"], "Key": "new"}}
    assert condition_of(s3.copy_object, **how, IfNoneMatch="*") == "If-None-Match"
    assert condition_of(s3.copy_object, **how, IfMatch='"other"') == "If-Match"


def test_a_race_that_is_lost_while_the_body_comes(wire: Wire, s3: Any, bucket: str) -> None:
    """Nothing was there when the upload was let in; something is when it is committed."""
    request = wire.put(f"/{bucket}/k", bytes(300_000), headers={"if-none-match": "*"})
    sock = wire.connect()
    sock.sendall(request[:-1])
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    sock.sendall(request[-1:])
    answer = read_answer(sock, "PUT")
    assert (answer.status, answer.code) == (412, "PreconditionFailed")
    assert b"<Condition>If-None-Match</Condition>" in answer.body
