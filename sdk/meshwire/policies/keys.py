"""The facts about a request that conditions may ask for.

Law: a key is either worked out by the server, or by its nature never there (no request comes through a
VPC), or refused when the policy is written: a deny that silently never applies would be a hole.
"""

from __future__ import annotations

from typing import Final

KNOWN: Final = frozenset(
    [
        "aws:currenttime",
        "aws:epochtime",
        "aws:principalarn",
        "aws:principaltype",
        "aws:referer",
        "aws:securetransport",
        "aws:sourceip",
        "aws:tokenissuetime",
        "aws:useragent",
        "aws:userid",
        "aws:username",
        "s3:authtype",
        "s3:delimiter",
        "s3:max-keys",
        "s3:prefix",
        "s3:requestobjecttagkeys",
        "s3:resourceaccount",
        "aws:resourceaccount",
        "s3:signatureage",
        "s3:signatureversion",
        "s3:tlsversion",
        "s3:versionid",
        "s3:x-amz-acl",
        "s3:x-amz-content-sha256",
        "s3:x-amz-copy-source",
        "s3:x-amz-grant-full-control",
        "s3:x-amz-grant-read",
        "s3:x-amz-grant-read-acp",
        "s3:x-amz-grant-write",
        "s3:x-amz-grant-write-acp",
        "s3:x-amz-metadata-directive",
        "s3:x-amz-object-ownership",
        "s3:x-amz-server-side-encryption",
        "s3:x-amz-server-side-encryption-aws-kms-key-id",
        "s3:x-amz-server-side-encryption-customer-algorithm",
        "s3:x-amz-storage-class",
        "s3:x-amz-website-redirect-location",
        "s3:if-match",
        "s3:if-none-match",
        "s3:objectcreationoperation",
    ]
)
KNOWN_PREFIXES: Final = ("s3:existingobjecttag/", "s3:requestobjecttag/", "s3:buckettag/")

# What this server's requests never have, so that the truth about them is that they are not there.
ABSENT: Final = frozenset(
    [
        "aws:calledvia",
        "aws:calledviafirst",
        "aws:calledvialast",
        "aws:federatedprovider",
        "aws:multifactorauthage",
        "aws:multifactorauthpresent",
        "aws:principalisawsservice",
        "aws:principalorgid",
        "aws:principalorgpaths",
        "aws:principalservicename",
        "aws:sourceaccount",
        "aws:sourcearn",
        "aws:sourceorgid",
        "aws:sourceorgpaths",
        "aws:sourceowner",
        "aws:sourcevpc",
        "aws:sourcevpcarn",
        "aws:sourcevpce",
        "aws:viaawsservice",
        "aws:vpcsourceip",
        "s3:accessgrantsinstancearn",
        "s3:accesspointnetworkorigin",
        "s3:dataaccesspointaccount",
        "s3:dataaccesspointarn",
        "s3:inventoryaccessibleoptionalfields",
        "s3:object-lock-legal-hold",
        "s3:object-lock-mode",
        "s3:object-lock-remaining-retention-days",
        "s3:object-lock-retain-until-date",
    ]
)
ABSENT_PREFIXES: Final = ("aws:principaltag/",)


# Right for S3, and not worked out here.
UNSUPPORTED: Final = frozenset(
    ["aws:requestedregion", "aws:tagkeys", "s3:jobsuspendedcause", "s3:locationconstraint"]
)
UNSUPPORTED_PREFIXES: Final = ("aws:requesttag/", "aws:resourcetag/")


def is_known(key: str) -> bool:
    """Whether a policy may ask for `key` (lower case)."""
    return key in KNOWN or key in ABSENT or key.startswith(KNOWN_PREFIXES + ABSENT_PREFIXES)


def is_unsupported(key: str) -> bool:
    """Whether S3 has `key` (lower case) and this server does not."""
    return key in UNSUPPORTED or key.startswith(UNSUPPORTED_PREFIXES)
