"""Admission of a request: one sequence for every endpoint, from the signature to the permission.

A request is authenticated, then accounted to its tenant, then authorized, in this order; nothing of its body
is read before. A request whose body took long is admitted once more, by the state at that time. Connection
limits apply first (`connection_limits`). The origin of a forwarded request is its client's connection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from meshd.server.s3.authentication import ANONYMOUS, request_context
from meshd.util.admission import set_tenant
from meshwire.s3.operations import Preflight

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import RemoteRecord, RequestContext
    from meshd.server.connection import Connection
    from meshd.server.proxy.hop_headers import Hop
    from meshd.server.request import MeshRequest
    from meshd.server.request_trace import RequestTrace
    from meshd.server.s3.authentication import Authenticator, VerifiedSigner
    from meshwire.s3.operations import Operation
    from meshwire.s3.parse_request import RequestHead


class Identified(NamedTuple):
    """The signer, and the facts about the request for policies."""

    signer: VerifiedSigner
    context: RequestContext


class Admitted(NamedTuple):
    """The operation, its signer, and the facts about the request for policies."""

    operation: Operation
    signer: VerifiedSigner
    context: RequestContext


class RequestAdmission:
    """Admits requests, or raises S3Error. One instance per process."""

    def __init__(self, authenticator: Authenticator, access: Authorizer) -> None:
        self._authenticator, self._access = authenticator, access

    def __repr__(self) -> str:
        return "<RequestAdmission>"

    def identify(
        self, head: RequestHead, origin: MeshRequest | Connection | Hop, trace: RequestTrace
    ) -> Identified:
        """Authenticate the request from `origin`, and account it to its tenant. Authorizes nothing."""
        signer = self._authenticator.authenticate(head, trace)
        set_tenant(signer.identity.account)
        return Identified(signer, request_context(origin, head, signer))

    def admit(
        self,
        head: RequestHead,
        operation: Operation,
        origin: MeshRequest | Connection | Hop,
        trace: RequestTrace,
        resolve: Callable[[Operation], Operation] | None = None,
        remote_record: RemoteRecord | None = None,
    ) -> Admitted:
        """Identify, then authorize. `resolve` determines what the operation means, which only an
        authenticated client may learn. `remote_record` is the object that it reads, if another node holds
        it."""
        # Browsers do not sign preflights: the bucket's CORS rules decide.
        if isinstance(operation, Preflight):
            return Admitted(operation, ANONYMOUS, request_context(origin, head, ANONYMOUS))
        signer, context = self.identify(head, origin, trace)
        if remote_record is not None:
            context = replace(context, remote_record=remote_record)
        if resolve is not None:
            operation = trace.target = resolve(operation)
        self._access.authorize(signer.identity, operation, context)
        return Admitted(operation, signer, context)

    def readmit(
        self,
        head: RequestHead,
        operation: Operation | None,
        signer: VerifiedSigner,
        context: RequestContext,
    ) -> VerifiedSigner:
        """Admit a request again after its body has arrived, perhaps over hours: keys and policies may have
        changed. Without an `operation` it is only authenticated."""
        signer = self._authenticator.reauthenticate(head, signer)
        if operation is not None:
            self._access.authorize(signer.identity, operation, context)
        return signer
