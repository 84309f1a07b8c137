"""Request facts: the values of IAM condition keys for one request, computed on demand.

A fact is what the server knows (connection, signature, clock, its own records), never what a client
claims about itself, except for headers that condition keys name. Keys are compared without regard to
case; an absent fact raises KeyError.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from meshd.control.roles import ROLE_PREFIX
from meshd.core.api_errors import store_errors
from meshd.store.errors import NotCachedError
from meshwire.http_values.dates import parse_amz
from meshwire.iam.parse import role_arn, user_arn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.auth.identity import FindRecord, Identity, RequestContext
    from meshd.auth.required_actions import RequiredAction
    from meshd.control.buckets import Bucket
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.iam.compiled_policies import Values

_EXISTING_TAG: Final = "s3:existingobjecttag/"
_BUCKET_TAG: Final = "s3:buckettag/"
# Condition keys that are the value of a header, of the same name or another.
_HEADERS: Final = {
    "aws:referer": "referer",
    "aws:useragent": "user-agent",
    "s3:if-match": "if-match",
    "s3:if-none-match": "if-none-match",
}
_HEADER_PREFIX: Final = "s3:x-amz-"
# An object that is being created has no tags yet.
_CREATING: Final = frozenset({"s3:PutObject", "s3:CreateBucket"})


def record_finder(store: ObjectStore) -> FindRecord:
    """Return the function with which the authorizer looks up an object or a version. It raises S3Error."""

    def find(bucket: str, key: str, version: str | None) -> Record | None:
        with store_errors():
            try:
                return store.get(bucket, key) if version is None else store.get_version(bucket, key, version)
            except NotCachedError:  # an object at an origin has no tags and no ACL
                return None

    return find


class RequestFacts(Mapping[str, "Values"]):
    """The facts of one required action. `find` returns the record of an object or of a version."""

    __slots__ = ("_bucket", "_context", "_find", "_identity", "_need", "_now_ms")

    def __init__(
        self,
        identity: Identity,
        need: RequiredAction,
        bucket: Bucket | None,
        context: RequestContext,
        now_ms: int,
        find: FindRecord,
    ) -> None:
        self._identity, self._need, self._bucket = identity, need, bucket
        self._context, self._now_ms, self._find = context, now_ms, find

    def __repr__(self) -> str:
        return f"<RequestFacts of {self._need.action} by {self._identity.user_id!r}>"

    def __getitem__(self, key: str) -> Values:
        found = self._need.facts.get(key)
        if found is None:
            found = self._work_out(key)
        if found is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._need.facts)

    def __len__(self) -> int:
        return len(self._need.facts)

    def _work_out(self, key: str) -> Values | None:
        known = _KNOWN.get(key)
        if known is not None:
            return known(self)
        if key in _HEADERS or key.startswith(_HEADER_PREFIX):
            return self._context.headers.get(_HEADERS.get(key) or key.removeprefix("s3:"))
        if key.startswith(_EXISTING_TAG):
            return self._existing_tag(key.removeprefix(_EXISTING_TAG))
        if key.startswith(_BUCKET_TAG):
            tags = None if self._bucket is None else self._bucket.tags
            return _tag(tags or {}, key.removeprefix(_BUCKET_TAG))
        return None

    def _existing_tag(self, name: str) -> str | None:
        need = self._need
        if not need.key or need.action in _CREATING:
            return None
        record = self._context.find_record(self._find, need.bucket, need.key, need.version)
        return None if record is None else _tag(record.tags, name)

    # --- one by one -----------------------------------------------------------------------------------

    def _current_time(self) -> str:
        moment = datetime.fromtimestamp(self._now_ms // 1000, UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    def _epoch_time(self) -> str:
        return str(self._now_ms // 1000)

    def _user(self) -> str | None:
        return self._identity.user_id or None

    def _user_name(self) -> str | None:
        return None if self._of_role() else self._user()

    def _user_arn(self) -> str | None:
        user_id = self._identity.user_id
        return role_arn(user_id) if self._of_role() else user_arn(user_id) if user_id else None

    def _user_type(self) -> str:
        return "AssumedRole" if self._of_role() else "User" if self._identity.user_id else "Anonymous"

    def _of_role(self) -> bool:
        return self._identity.user_id.startswith(ROLE_PREFIX)

    def _secure(self) -> str:
        return "true" if self._context.secure else "false"

    def _source(self) -> str | None:
        return self._context.source_ip or None

    def _token_time(self) -> str | None:
        session = self._identity.session
        return None if session is None else str(session.issued)

    def _auth_type(self) -> str | None:
        if not self._identity.user_id:
            return None
        if self._context.form:
            return "POST"
        return "REST-QUERY-STRING" if self._context.presigned else "REST-HEADER"

    def _signature_age(self) -> str | None:
        signed = parse_amz(self._context.signed)
        return None if signed is None else str(max(0, self._now_ms - signed * 1000))

    def _signature_version(self) -> str | None:
        return self._context.signature or None

    def _owner(self) -> str | None:
        return None if self._bucket is None else self._bucket.owner

    def _tls(self) -> str | None:
        return self._context.tls or None

    def _version(self) -> str | None:
        return self._need.version


_KNOWN: Final[dict[str, Callable[[RequestFacts], Values | None]]] = {
    "aws:currenttime": RequestFacts._current_time,
    "aws:epochtime": RequestFacts._epoch_time,
    "aws:principalarn": RequestFacts._user_arn,
    "aws:principaltype": RequestFacts._user_type,
    "aws:resourceaccount": RequestFacts._owner,
    "aws:securetransport": RequestFacts._secure,
    "aws:sourceip": RequestFacts._source,
    "aws:tokenissuetime": RequestFacts._token_time,
    "aws:userid": RequestFacts._user,
    "aws:username": RequestFacts._user_name,
    "s3:authtype": RequestFacts._auth_type,
    "s3:resourceaccount": RequestFacts._owner,
    "s3:signatureage": RequestFacts._signature_age,
    "s3:signatureversion": RequestFacts._signature_version,
    "s3:tlsversion": RequestFacts._tls,
    "s3:versionid": RequestFacts._version,
    # The only header value that comes from the operation, decoded: see `required_actions`.
    "s3:x-amz-copy-source": lambda _: None,
}


def _tag(tags: Mapping[str, str], name: str) -> str | None:
    return next((value for key, value in tags.items() if key.lower() == name), None)
