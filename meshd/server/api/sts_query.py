"""The AWS STS Query protocol at `POST /`: tokens of identity providers are exchanged for temporary keys.

botocore, awscli and the SDK use it with `AWS_ROLE_ARN` and `AWS_WEB_IDENTITY_TOKEN_FILE`. S3 has no POST on
the service itself, so a URL-encoded form at exactly `/` is an STS request and nothing else is: an upload form
is `multipart/form-data` and goes to a bucket. A browser can send such a form, but it has no credentials to
add to it, and without CORS headers no page reads the answer. Every node answers from its own tables.
"""

from __future__ import annotations

import hashlib
import logging
import re
from typing import TYPE_CHECKING, Final

from meshd.control.control_api import ControlError
from meshd.server.request import RequestTrace, request_head
from meshd.server.request_body import RequestBody
from meshd.server.response import Reply, send_reply
from meshd.telemetry import metrics
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.sts_query import (
    ASSUME_ROLE_WITH_WEB_IDENTITY,
    FORM_TYPE,
    GET_CALLER_IDENTITY,
    MAX_FORM_BYTES,
    StsError,
    parse_form,
    read_action,
    read_web_identity_request,
    render_assumed_role,
    render_caller_identity,
    render_sts_error,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.web_identity.exchange import WebIdentityExchange
    from meshd.cluster.cluster_view import ClusterView
    from meshd.config import HttpSettings
    from meshd.server.request import MeshRequest
    from meshd.server.response import Header
    from meshd.server.s3.request_auth import Authenticator
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock

_OPERATION: Final = "STS"  # until the form is read
_ROLE_NAME = re.compile(r"[\w.@+-]{1,64}", re.ASCII)
# Errors of the server below → the code that STS's clients know for them.
_CODES: Final[Mapping[str, str]] = {
    "InvalidAccessKeyId": "InvalidClientTokenId",
    "InvalidToken": "InvalidClientTokenId",
    "ExpiredToken": "ExpiredToken",
    "SignatureDoesNotMatch": "SignatureDoesNotMatch",
    "AccessDenied": "AccessDenied",
    "RequestTimeTooSkewed": "SignatureDoesNotMatch",
    "MaxMessageLengthExceeded": "ValidationError",
    "SlowDown": "ServiceUnavailable",
}
_log = logging.getLogger(__name__)


def is_sts_request(request: MeshRequest) -> bool:
    """Whether a request, whose host names no bucket, is one of the STS protocol."""
    if request.method != "POST" or request.raw_path != "/":
        return False
    media_type = request.headers.get("content-type", "").partition(";")[0]
    return media_type.strip().lower() == FORM_TYPE


class StsQueryEndpoint:
    """Answers STS requests. One per worker; stateless."""

    def __init__(
        self,
        exchange: WebIdentityExchange,
        authenticator: Authenticator,
        mesh: ClusterView,
        clock: Clock,
        audit: AuditLog | None,
        http: HttpSettings,
    ) -> None:
        self._exchange, self._authenticator, self._mesh = exchange, authenticator, mesh
        self._clock, self._audit, self._http = clock, audit, http

    def __repr__(self) -> str:
        return f"<StsQueryEndpoint {self._exchange!r}>"

    async def handle(self, request: MeshRequest) -> Reply:
        """Answer one request."""
        trace = RequestTrace(self._clock, self._audit, request.remote)
        trace.operation, trace.target = _OPERATION, "/"
        return await send_reply(request, trace, self._reply(request, trace), self._mesh)

    async def _reply(self, request: MeshRequest, trace: RequestTrace) -> Reply:
        """Return the response, or an error. Raises only ConnectionError and CancelledError: the client is
        gone."""
        try:
            return await self._answer(request, trace)
        except StsError as error:
            return self._refuse(error, trace)
        except S3Error as error:
            code = _CODES.get(error.code, "ValidationError" if error.status < 500 else "ServiceUnavailable")
            return self._refuse(StsError(code, error.message), trace)
        except ControlError:
            return self._refuse(StsError("ServiceUnavailable", "The control store cannot be reached."), trace)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request %s (%s) failed", trace.request_id, trace.operation)
            return self._refuse(StsError("InternalFailure", "The request failed; see the node's log."), trace)

    async def _answer(self, request: MeshRequest, trace: RequestTrace) -> Reply:
        head = request_head(request, self._http.max_header_bytes)
        body = RequestBody(request, head, self._http.body_timeout)
        try:
            form = await body.whole(BodyDigests(), MAX_FORM_BYTES)
        finally:
            trace.received += body.received
        fields = parse_form(form)
        action = read_action(fields)
        if action == ASSUME_ROLE_WITH_WEB_IDENTITY:
            trace.operation = action
            return self._xml(200, await self._assume_role(fields, trace), trace)
        if action == GET_CALLER_IDENTITY:
            trace.operation = action
            claimed = hashlib.sha256(form).hexdigest()
            signer = self._authenticator.authenticate(head, trace, service="sts", payload_hash=claimed)
            if signer.claim is None:
                raise StsError("AccessDenied", "GetCallerIdentity must be signed (signature version 4).")
            identity = signer.identity
            told = render_caller_identity(identity.principal, identity.arn, trace.request_id)
            return self._xml(200, told, trace)
        raise StsError(
            "InvalidAction",
            f"This server supports {ASSUME_ROLE_WITH_WEB_IDENTITY} and {GET_CALLER_IDENTITY}. Temporary "
            "credentials of a key: POST /-/sts (meshd admin sts).",
        )

    async def _assume_role(self, fields: Mapping[str, str], trace: RequestTrace) -> bytes:
        try:
            wanted = read_web_identity_request(fields)
            if _ROLE_NAME.fullmatch(wanted.role):
                trace.role = wanted.role
            done = await self._exchange.exchange(wanted)
        except StsError as error:
            metrics.sts_exchanges.labels(error.code).inc()
            raise
        metrics.sts_exchanges.labels("ok").inc()
        trace.identity, trace.access_key = done.identity, done.identity.access_key
        return render_assumed_role(done.answer, trace.request_id)

    def _refuse(self, error: StsError, trace: RequestTrace) -> Reply:
        trace.code = error.code
        return self._xml(error.status, render_sts_error(error, trace.request_id), trace)

    def _xml(self, status: int, body: bytes, trace: RequestTrace) -> Reply:
        headers: list[Header] = [
            ("Content-Type", "text/xml"),
            ("Content-Length", str(len(body))),
            ("x-amzn-RequestId", trace.request_id),
            ("Cache-Control", "no-store"),  # it may contain a secret
        ]
        return Reply(status, headers, body, self._clock.now_ms() // 1000)
