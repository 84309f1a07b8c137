"""ACLs: parses headers and documents into values, and writes the documents that clients read back.

Law: pure; this module does not know which users exist, so a grant to an email address becomes
`mailto:ADDRESS` and an id stays as given.
Invariant: any bytes give an `Acl` or an S3Error, and a written document parses back to the same value.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/acl-overview.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, cast, get_args

from meshwire.errors import S3Error
from meshwire.s3 import listings
from meshwire.s3.bucket_settings import ALL_USERS, AUTHENTICATED_USERS, Acl, CannedAcl, Grant, Permission
from meshwire.s3.request_head import invalid_argument
from meshwire.s3.xml_io import parse_xml, xml_element

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.result_types import Owner
    from meshwire.s3.xml_io import Element

MAILTO = "mailto:"
GROUPS = frozenset({ALL_USERS, AUTHENTICATED_USERS})
MAX_GRANTS = 100
MAX_ACL_BYTES = 256 << 10

_CANNED = frozenset(get_args(CannedAcl))
_UNBUILT = frozenset({"aws-exec-read", "log-delivery-write"})
_PERMISSIONS = frozenset(get_args(Permission))
_GRANT_HEADERS: Mapping[str, Permission] = {
    "x-amz-grant-read": "READ",
    "x-amz-grant-write": "WRITE",
    "x-amz-grant-read-acp": "READ_ACP",
    "x-amz-grant-write-acp": "WRITE_ACP",
    "x-amz-grant-full-control": "FULL_CONTROL",
}
_ACL_HEADERS = frozenset({"x-amz-acl", *_GRANT_HEADERS})
_GRANTEE = re.compile(r'(id|uri|emailAddress)\s*=\s*(?:"([^"]*)"|([^",\s]*))\Z', re.IGNORECASE)
_XSI = ' xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'


class AclDocument(NamedTuple):
    """An AccessControlPolicy: the owner it names, and the grants."""

    owner: str
    acl: Acl


# --- what an ACL grants -------------------------------------------------------------------------------------


def effective_grants(acl: Acl | None, owner: str, bucket_owner: str = "") -> tuple[Grant, ...]:
    """Expand an ACL into individual grants, the owner's first. None means `private`; `bucket_owner` is the
    owner of an object's bucket."""
    if acl is not None and not acl.canned:
        return acl.grants
    canned = "private" if acl is None else acl.canned
    grants = [Grant(owner, "FULL_CONTROL")]
    if canned == "public-read-write":
        grants += [Grant(ALL_USERS, "READ"), Grant(ALL_USERS, "WRITE")]
    elif canned == "public-read":
        grants.append(Grant(ALL_USERS, "READ"))
    elif canned == "authenticated-read":
        grants.append(Grant(AUTHENTICATED_USERS, "READ"))
    elif canned.startswith("bucket-owner-") and bucket_owner not in {"", owner}:
        grants.append(Grant(bucket_owner, "READ" if canned == "bucket-owner-read" else "FULL_CONTROL"))
    return tuple(grants)


def is_public_acl(acl: Acl | None) -> bool:
    """Whether the ACL grants anything to everyone or to all authenticated users, which a public access
    block prevents."""
    return acl is not None and any(grant.grantee in GROUPS for grant in effective_grants(acl, ""))


# --- headers ------------------------------------------------------------------------------------------------


def read_acl_headers(headers: Mapping[str, str]) -> Acl | None:
    """Parse x-amz-acl or the x-amz-grant-* headers; None if there are none.

    Raises S3Error: InvalidArgument, InvalidRequest (both), NotImplemented.
    """
    if _ACL_HEADERS.isdisjoint(headers):
        return None
    canned = headers.get("x-amz-acl")
    granted = [name for name in _GRANT_HEADERS if name in headers]
    if canned is None:
        return _parse_grants(headers, granted)
    if granted:
        raise S3Error("InvalidRequest", "Specifying both Canned ACLs and Header Grants is not allowed")
    if canned in _UNBUILT:
        raise S3Error("NotImplemented", f"The canned ACL {canned} is not implemented.")
    if canned not in _CANNED:
        raise invalid_argument("x-amz-acl", canned, f"Unknown canned ACL {canned[:64]!r}.")
    return Acl(cast("CannedAcl", canned))


def _parse_grants(headers: Mapping[str, str], names: list[str]) -> Acl:
    grants = tuple(
        Grant(_header_grantee(name, entry), _GRANT_HEADERS[name])
        for name in names
        for entry in headers[name].split(",")
        if entry.strip()
    )
    return _check_limit(Acl("", grants))


def _header_grantee(name: str, entry: str) -> str:
    match = _GRANTEE.match(entry.strip())
    if match is None or not (match[2] or match[3]):
        raise invalid_argument(
            name, entry, 'A grantee must have the form id="…", uri="…" or emailAddress="…"'
        )
    return _grantee(match[1].lower(), match[2] or match[3])


def _grantee(kind: str, value: str) -> str:
    if kind == "emailaddress":
        return MAILTO + value
    if kind == "uri" and value not in GROUPS:
        raise invalid_argument("uri", value, "Invalid group uri")
    if kind == "id" and (value in GROUPS or value.startswith(MAILTO)):
        raise invalid_argument("id", value, "Invalid id")
    return value


def _check_limit(acl: Acl) -> Acl:
    if len(acl.grants) > MAX_GRANTS:
        raise S3Error("MalformedACLError", f"An ACL can have at most {MAX_GRANTS} grants.")
    return acl


# --- documents ----------------------------------------------------------------------------------------------


def parse_acl(body: bytes) -> AclDocument:
    """Parse an AccessControlPolicy. Raises S3Error: MalformedACLError, InvalidArgument."""
    try:
        root = parse_xml(body, root="AccessControlPolicy", max_bytes=MAX_ACL_BYTES)
        _require_known_elements(root)
    except S3Error as error:
        if error.code == "MalformedXML":
            raise S3Error("MalformedACLError", str(error.message)) from None
        raise
    owner, listed = root.find_first("Owner"), root.find_first("AccessControlList")
    if owner is None or listed is None or not owner.child_text("ID").strip():
        raise S3Error(
            "MalformedACLError", "An AccessControlPolicy needs an Owner with an ID, and an AccessControlList."
        )
    grants = tuple(map(_parse_grant, listed.find_all("Grant")))
    return AclDocument(owner.child_text("ID").strip(), _check_limit(Acl("", grants)))


def _require_known_elements(root: Element) -> None:
    """Raise MalformedXML for an unknown or repeated element: none is silently dropped."""
    root.require_known(("Owner", "AccessControlList"))
    for owner in root.find_all("Owner"):
        owner.require_known(("ID", "DisplayName"))
    for listed in root.find_all("AccessControlList"):
        listed.require_known((), ("Grant",))
        for grant in listed.find_all("Grant"):
            grant.require_known(("Grantee", "Permission"))
            for grantee in grant.find_all("Grantee"):
                grantee.require_known(("ID", "DisplayName", "URI", "EmailAddress"))


def _parse_grant(element: Element) -> Grant:
    permission = element.child_text("Permission").strip()
    grantee = element.find_first("Grantee")
    if grantee is None or permission not in _PERMISSIONS:
        raise S3Error("MalformedACLError")
    named = [
        (kind.lower(), child.text.strip())
        for kind in ("ID", "URI", "EmailAddress")
        if (child := grantee.find_first(kind)) is not None
    ]
    if len(named) != 1 or not named[0][1]:
        raise S3Error("MalformedACLError", "A Grantee needs exactly one of ID, URI and EmailAddress.")
    return Grant(_grantee(*named[0]), cast("Permission", permission))


def acl_document(owner: Owner, grants: tuple[Grant, ...], names: Mapping[str, str]) -> str:
    """Write the document of GetBucketAcl and GetObjectAcl, groups first; `names` are the display names of
    user ids."""
    ordered = sorted(grants, key=lambda grant: grant.grantee not in GROUPS)
    listed = "".join(_grant(grant, names) for grant in ordered)
    return listings.root_element(
        "AccessControlPolicy",
        listings.owner_element("Owner", owner),
        f"<AccessControlList>{listed}</AccessControlList>",
    )


def _grant(grant: Grant, names: Mapping[str, str]) -> str:
    if grant.grantee in GROUPS:
        kind, inside = "Group", xml_element("URI", grant.grantee)
    else:
        kind = "CanonicalUser"
        inside = xml_element("ID", grant.grantee) + xml_element("DisplayName", names.get(grant.grantee, ""))
    grantee = f'<Grantee{_XSI} xsi:type="{kind}">{inside}</Grantee>'
    return f"<Grant>{grantee}{xml_element('Permission', grant.permission)}</Grant>"
