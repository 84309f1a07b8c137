"""Runs in a pod with a role: reads and writes by what its environment gives, with the SDK and, if the image
has it, boto3. Prints one line of JSON: what each was allowed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import meshsdk as mesh
from meshsdk.errors import AccessError

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "0001.bin"


def allowed(call: Callable[[], object], refusals: tuple[type[Exception], ...]) -> Any:
    """Return whether the call was allowed. Raises whatever is no refusal."""
    try:
        call()
    except refusals as error:
        if "AccessDenied" not in str(error):
            raise
        return False
    return True


def main() -> None:
    found: dict[str, Any] = {"keys in the environment": "AWS_ACCESS_KEY_ID" in os.environ}
    with mesh.connect() as client:
        refusals = (AccessError,)
        found["sdk reads"] = allowed(lambda: client.get("samples", KEY), refusals)
        found["sdk writes"] = allowed(lambda: client.put("samples", KEY, b"x"), refusals)
        found["sdk reads another bucket"] = allowed(lambda: client.get("load", "old/1"), refusals)
    try:
        import boto3
        from botocore.exceptions import ClientError
    except ImportError:
        found["boto3"] = "not in the image"
    else:
        s3, refusals = boto3.client("s3"), (ClientError,)
        found["boto3 is"] = boto3.client("sts").get_caller_identity()["Arn"].rpartition("/")[0]
        found["boto3 reads"] = allowed(lambda: s3.get_object(Bucket="samples", Key=KEY), refusals)
        found["boto3 lists"] = allowed(lambda: s3.list_objects_v2(Bucket="samples"), refusals)
        found["boto3 writes"] = allowed(lambda: s3.put_object(Bucket="samples", Key=KEY, Body=b"x"), refusals)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
