"""Required actions: the IAM actions, resources and facts that each S3 operation needs.

Every operation has one entry, and all of its required actions must be allowed. An operation with several
targets names each of them; tags and ACLs that a header sets are actions of their own.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.iam.compiled_policies import Values
    from meshwire.s3.bucket_settings import BucketSetting
    from meshwire.s3.operations import Operation

    Facts = Mapping[str, Values]

_NO_FACTS: Final[dict[str, Any]] = {}


class RequiredAction(NamedTuple):
    """One action on the service (no bucket), a bucket, a key, or the resource that `arn` names. `facts` are
    by lower-case condition key."""

    action: str
    bucket: str = ""
    key: str = ""
    version: str | None = None
    facts: Facts = _NO_FACTS
    arn: str = ""

    @property
    def resource(self) -> str:
        """The ARN of the resource."""
        if self.arn:
            return self.arn
        return f"arn:aws:s3:::{self.bucket}/{self.key}" if self.key else f"arn:aws:s3:::{self.bucket}"


def required_actions(operation: Operation) -> tuple[RequiredAction, ...]:
    """Return every action that `operation` needs. Empty where the body decides (DeleteObjects, PostObject)
    and where none is needed (a preflight)."""
    return _TABLE[type(operation)](operation)


def delete_actions(
    bucket: str, key: str, version: str | None, *, compared: bool = False
) -> tuple[RequiredAction, ...]:
    """Return the actions that deleting a key or a version needs. `compared`: only if its ETag matches."""
    need = RequiredAction(_action_name("s3:Delete{}", version), bucket, key, version)
    return (need, RequiredAction("s3:GetObject", bucket, key)) if compared else (need,)


def tag_facts(tags: Mapping[str, str] | None) -> dict[str, Values]:
    """Return the facts that conditions may use about the tags in a request."""
    if not tags:
        return {}
    facts: dict[str, Values] = {f"s3:requestobjecttag/{name.lower()}": value for name, value in tags.items()}
    return facts | {"s3:requestobjecttagkeys": tuple(tags)}


# --- service and buckets --------------------------------------------------------------------------------


def _create_bucket(operation: ops.CreateBucket) -> tuple[RequiredAction, ...]:
    asked = [("s3:CreateBucket", True)]
    asked += [("s3:PutBucketAcl", operation.acl is not None)]
    asked += [("s3:PutBucketOwnershipControls", operation.ownership is not None)]
    return tuple(RequiredAction(action, operation.bucket) for action, needed in asked if needed)


def _on_bucket(action: str) -> Callable[[Any], tuple[RequiredAction, ...]]:
    return lambda operation: (RequiredAction(action, operation.bucket),)


# How the names of actions spell each sub-resource.
_SETTINGS: Final[Mapping[BucketSetting, str]] = {
    "accelerate": "AccelerateConfiguration",
    "acl": "BucketAcl",
    "cors": "BucketCORS",
    "encryption": "EncryptionConfiguration",
    "lifecycle": "LifecycleConfiguration",
    "logging": "BucketLogging",
    "notification": "BucketNotification",
    "object-lock": "BucketObjectLockConfiguration",
    "ownershipControls": "BucketOwnershipControls",
    "policy": "BucketPolicy",
    "policyStatus": "BucketPolicyStatus",
    "publicAccessBlock": "BucketPublicAccessBlock",
    "replication": "ReplicationConfiguration",
    "requestPayment": "BucketRequestPayment",
    "tagging": "BucketTagging",
    "versioning": "BucketVersioning",
    "website": "BucketWebsite",
}
# These two have an action of their own for removal; the others may be removed with the right to put them.
_REMOVABLE: Final = frozenset({"policy", "website"})


def _setting(verb: str) -> Callable[[Any], tuple[RequiredAction, ...]]:
    def need(operation: Any) -> tuple[RequiredAction, ...]:
        word = "Put" if verb == "Delete" and operation.setting not in _REMOVABLE else verb
        return (RequiredAction(f"s3:{word}{_SETTINGS[operation.setting]}", operation.bucket),)

    return need


def _listing(action: str) -> Callable[[Any], tuple[RequiredAction, ...]]:
    """Like `_on_bucket`, with prefix (possibly empty), delimiter and page size as facts."""

    def need(operation: Any) -> tuple[RequiredAction, ...]:
        facts: dict[str, Values] = {"s3:prefix": operation.prefix, "s3:delimiter": operation.delimiter}
        if not isinstance(operation, ops.ListMultipartUploads):
            facts["s3:max-keys"] = str(operation.max_keys)
        return (RequiredAction(action, operation.bucket, facts=facts),)

    return need


# --- objects ----------------------------------------------------------------------------------------------


def _action_name(template: str, version: str | None) -> str:
    return template.format("Object" if version is None else "ObjectVersion")


def _on_object(template: str) -> Callable[[Any], tuple[RequiredAction, ...]]:
    """Like `_on_bucket`, for an object. `template` has `{}` where actions on a version say
    `ObjectVersion`."""

    def need(operation: Any) -> tuple[RequiredAction, ...]:
        version = operation.version
        return (RequiredAction(_action_name(template, version), operation.bucket, operation.key, version),)

    return need


def _delete(operation: ops.DeleteObject) -> tuple[RequiredAction, ...]:
    return (*delete_actions(operation.bucket, operation.key, operation.version), *_comparison(operation))


def _attributes(operation: ops.GetObjectAttributes) -> tuple[RequiredAction, ...]:
    return _on_object("s3:Get{}")(operation) + _on_object("s3:Get{}Attributes")(operation)


def _write(operation: Any, *, creates: bool = True, facts: Facts = _NO_FACTS) -> tuple[RequiredAction, ...]:
    """PutObject, and the actions for `tags` and `acl` if the request sets them."""
    bucket, key = operation.bucket, operation.key
    tags, acl = getattr(operation, "tags", None), getattr(operation, "acl", None)
    known = {"s3:objectcreationoperation": "true" if creates else "false", **facts, **tag_facts(tags)}
    found = [RequiredAction("s3:PutObject", bucket, key, facts=known)]
    if tags:
        found.append(RequiredAction("s3:PutObjectTagging", bucket, key, facts=known))
    if acl is not None:
        found.append(RequiredAction("s3:PutObjectAcl", bucket, key, facts=known))
    return (*found, *_comparison(operation))


def _comparison(operation: Any) -> tuple[RequiredAction, ...]:
    """The read permission that comparing an ETag needs."""
    conditions = getattr(operation, "conditions", None)
    if conditions is None or not conditions.if_match or conditions.if_match == ("*",):
        return ()
    return (RequiredAction("s3:GetObject", operation.bucket, operation.key),)


def _read_source(operation: Any) -> RequiredAction:
    source = operation.source
    return RequiredAction(_action_name("s3:Get{}", source.version), source.bucket, source.key, source.version)


def _copy_source_facts(operation: Any) -> Facts:
    return {"s3:x-amz-copy-source": f"{operation.source.bucket}/{operation.source.key}"}


def _copy(operation: ops.CopyObject) -> tuple[RequiredAction, ...]:
    return (_read_source(operation), *_write(operation, facts=_copy_source_facts(operation)))


def copied_tag_actions(operation: ops.CopyObject) -> tuple[RequiredAction, ...]:
    """Return the further actions that a copy needs when it takes over tags of its source."""
    source = operation.source
    action = _action_name("s3:Get{}Tagging", source.version)
    return (
        RequiredAction(action, source.bucket, source.key, source.version),
        RequiredAction(
            "s3:PutObjectTagging", operation.bucket, operation.key, facts=_copy_source_facts(operation)
        ),
    )


def _copy_part(operation: ops.UploadPartCopy) -> tuple[RequiredAction, ...]:
    return (_read_source(operation), *_write(operation, creates=False, facts=_copy_source_facts(operation)))


def _part(operation: Any) -> tuple[RequiredAction, ...]:
    return _write(operation, creates=False)


def _plain(action: str) -> Callable[[Any], tuple[RequiredAction, ...]]:
    return lambda operation: (RequiredAction(action, operation.bucket, operation.key),)


def _nothing(_: Operation) -> tuple[RequiredAction, ...]:
    return ()


_TABLE: Final[Mapping[type, Callable[[Any], tuple[RequiredAction, ...]]]] = {
    ops.ListBuckets: lambda _: (RequiredAction("s3:ListAllMyBuckets"),),
    ops.CreateBucket: _create_bucket,
    ops.HeadBucket: _on_bucket("s3:ListBucket"),
    ops.DeleteBucket: _on_bucket("s3:DeleteBucket"),
    ops.GetBucketLocation: _on_bucket("s3:GetBucketLocation"),
    ops.GetBucketSetting: _setting("Get"),
    ops.PutBucketSetting: _setting("Put"),
    ops.DeleteBucketSetting: _setting("Delete"),
    ops.Preflight: _nothing,
    ops.ListObjects: _listing("s3:ListBucket"),
    ops.ListObjectVersions: _listing("s3:ListBucketVersions"),
    ops.GetObject: _on_object("s3:Get{}"),
    ops.ListMembers: _on_object("s3:Get{}"),
    ops.PutObject: _write,
    ops.CopyObject: _copy,
    ops.DeleteObject: _delete,
    ops.DeleteObjects: _nothing,
    ops.PostObject: _nothing,
    ops.GetObjectTagging: _on_object("s3:Get{}Tagging"),
    ops.PutObjectTagging: _on_object("s3:Put{}Tagging"),
    ops.DeleteObjectTagging: _on_object("s3:Delete{}Tagging"),
    ops.GetObjectAcl: _on_object("s3:Get{}Acl"),
    ops.PutObjectAcl: _on_object("s3:Put{}Acl"),
    ops.GetObjectAttributes: _attributes,
    ops.CreateMultipartUpload: _part,
    ops.UploadPart: _part,
    ops.UploadPartCopy: _copy_part,
    ops.CompleteMultipartUpload: _write,
    ops.AbortMultipartUpload: _plain("s3:AbortMultipartUpload"),
    ops.ListParts: _plain("s3:ListMultipartUploadParts"),
    ops.ListMultipartUploads: _listing("s3:ListBucketMultipartUploads"),
}
