"""The table of docs/s3.md names every operation of S3's reference, and tells the truth about each.

The reference is botocore's model of S3; the requests are boto3's own, with the least arguments a call takes.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

PAGE = Path(__file__).resolve().parents[2] / "docs" / "s3.md"
_ROW = re.compile(r"^\| (?P<names>[A-Z][A-Za-z0-9, ]+) \| (?P<how>yes|unset|501)\b")
# One of ours, not of the reference: the browser's question before it asks.
OURS = {"PostObject", "Preflight"}
# Signed for, or sent to, endpoints of other services.
ELSEWHERE = {"ListDirectoryBuckets", "WriteGetObjectResponse"}
UNLIKE_SERVED = {"NotImplemented", "MethodNotAllowed", "InternalError"}


def table() -> dict[str, str]:
    """Operation → "yes", "unset" (S3's answer for what was never configured) or "501"."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        if match := _ROW.match(line):
            for name in match["names"].split(", "):
                assert name not in found, f"{name} stands twice in the table"
                found[name] = match["how"]
    return found


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Any]:
    """boto3 that sends whatever it is given, signed as always."""
    config = Config(
        parameter_validation=False, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
    )
    made = daemon.client(config=config)
    yield made
    made.close()


def least(shape: Any, bucket: str) -> Any:
    """The least value of a shape: what is required, and one of each list."""
    kind = shape.type_name
    if kind == "structure":
        return {name: least(shape.members[name], bucket) for name in shape.required_members}
    if kind == "list":
        return [least(shape.member, bucket)]
    if kind == "map":
        return {}
    if shape.name in {"BucketName", "ObjectKey"}:
        return bucket if shape.name == "BucketName" else "k"
    if kind in {"integer", "long"}:
        return 1
    plain = {"boolean": False, "blob": b"", "timestamp": 0, "float": 1.0}
    return plain.get(kind, (getattr(shape, "enum", None) or ["x"])[0])


def code_of(client: Any, name: str, bucket: str) -> str:
    """The error code that the call is answered with; empty for a success."""
    operation = client.meta.service_model.operation_model(name)
    arguments = least(operation.input_shape, bucket) if operation.input_shape else {}
    if "CopySource" in arguments:
        arguments["CopySource"] = f"{bucket}/k"
    try:
        getattr(client, xform_name(name))(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def test_every_operation_of_the_reference_is_in_the_table(client: Any) -> None:
    listed = set(table())
    reference = set(client.meta.service_model.operation_names) - ELSEWHERE
    assert not reference - listed, "not in the table"
    assert listed - reference <= OURS, "not in the reference"


def test_the_table_is_true(client: Any, s3: Any) -> None:
    bucket = f"table-{uuid.uuid4().hex[:12]}"  # DeleteBucket is one of the operations
    s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    wrong = []
    told = {name: how for name, how in table().items() if name not in OURS}
    # Deletions last: the others need what they delete.
    for name in sorted(told, key=lambda name: (name.startswith("Delete"), name == "DeleteBucket")):
        code = code_of(client, name, bucket)
        if (code == "NotImplemented") != (told[name] == "501") or code in UNLIKE_SERVED - {"NotImplemented"}:
            wrong.append(f"{name}: the table says {told[name]}, the answer is {code or 'a success'}")
    assert not wrong, "\n".join(wrong)
    assert bucket not in {entry["Name"] for entry in s3.list_buckets()["Buckets"]}


@pytest.mark.parametrize(
    ("name", "method", "headers"),
    [
        ("PostObject", "POST", {"Content-Type": "multipart/form-data; boundary=x"}),
        ("Preflight", "OPTIONS", {"Origin": "http://a", "Access-Control-Request-Method": "PUT"}),
    ],
)
def test_what_the_reference_has_without_a_name(
    daemon: Daemon, bucket: str, name: str, method: str, headers: dict[str, str]
) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nf\r\n--x--\r\n'
    with contextlib.closing(daemon.connect()) as connection:
        connection.request(method, f"/{bucket}", form if method == "POST" else None, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert table()[name] == "yes"
    assert answer.status in {400, 403}
    assert not any(f"<Code>{code}</Code>" in text for code in UNLIKE_SERVED), text
