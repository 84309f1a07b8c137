"""The services that the endpoints of a worker use, constructed by `meshd/process/wiring` and passed down."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec

from meshd.config import HttpSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from meshd.auth.acls import AclService
    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identities.console_sessions import ConsoleSessions
    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.auth.web_identity.exchange import WebIdentityExchange
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.objects.archive_upload import ArchiveUploads
    from meshd.objects.buckets.service import BucketService, ChangeBroadcast
    from meshd.objects.buckets.settings import SettingService
    from meshd.objects.delete import DeleteService
    from meshd.objects.list_objects import ListingService
    from meshd.objects.multipart_upload import UploadService
    from meshd.objects.object_metadata import ObjectAclService, TaggingService
    from meshd.objects.object_reader import ObjectReader, VersionLookup
    from meshd.objects.service import ObjectService
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.peer_reads.resume_read import ResumeRead
    from meshd.reads.archive_members import MemberService
    from meshd.reads.copy_source import RemoteCopySources
    from meshd.reads.near_cache_reader import NearCacheReader
    from meshd.server.console.oidc_sign_in import OidcSignIn
    from meshd.server.peer_endpoint import PeerAuthenticator
    from meshd.server.proxy.fan_out import FanOut
    from meshd.server.proxy.forwarder import Forwarder
    from meshd.store.disks.cold_reads import ColdReader
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock
    from meshd.views.dispatch import ViewDispatcher


class ServerServices(msgspec.Struct, frozen=True):
    """The services that the endpoints use; `http` has sizes and timeouts."""

    access: Authorizer
    sessions: CredentialService
    buckets: BucketService
    bucket_table: BucketTable
    reader: ObjectReader
    objects: ObjectService
    archive_uploads: ArchiveUploads
    uploads: UploadService
    listings: ListingService
    settings: SettingService
    acls: AclService
    views: ViewDispatcher
    members: MemberService
    object_acls: ObjectAclService
    versions: VersionLookup
    deleter: DeleteService
    tagging: TaggingService
    clock: Clock
    mesh: ClusterView
    control_snapshot: Callable[[], AbstractContextManager[object]] = nullcontext
    """Within it, a request reads the control state only once (ControlStore.pin_revisions)."""
    audit: AuditLog | None = None
    http: HttpSettings = msgspec.field(default_factory=HttpSettings)
    web_identity: WebIdentityExchange | None = None
    """Exchanges tokens of identity providers; None where STS is not served."""
    forwarder: Forwarder | None = None
    """Forwards requests to other nodes; None where there are none."""
    backed: BackedBucketService | None = None
    """Buckets with origins; None where there are none."""
    nearby_reader: NearCacheReader | None = None
    """Reads data of other nodes through this node's copies; None where there are none."""
    fan_out: FanOut | None = None
    copy_sources: RemoteCopySources | None = None
    resume_read: ResumeRead | None = None
    """Returns the rest of responses whose local bytes became unreadable; None where there are no other
    nodes."""
    bucket_changes: ChangeBroadcast | None = None
    peer_authenticator: PeerAuthenticator | None = None
    """Authenticates other nodes; None where there are none."""
    console_oidc: OidcSignIn | None = None
    """Sign-in to the console at an identity provider; None where that is not configured."""
    console_sessions: ConsoleSessions | None = None
    """Sessions of the web console; None where it is off."""
    cold_reader: ColdReader | None = None
    """Reads large responses from rotational disks; None where there are none."""
    region: str = "us-east-1"
    """The region of new buckets."""
