"""POST Object: uploads by HTML form. Fields come first, then the file, which streams into the store.

The form is authenticated, checked against its policy and authorized before a byte of its file is passed on.
Nothing is stored unless the form ended properly and its file had a size that the policy allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.auth.authorizer import EXPECTED_OWNER_HEADERS
from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.server.proxy.forwarder import AlreadyAnsweredError
from meshd.server.proxy.hops import ObjectName, may_answer
from meshd.server.proxy.upstream_request import PartialBody
from meshd.server.request_body import hashed_blocks
from meshd.server.s3.request_auth import SIGV2_NAME, SIGV4_NAME
from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.errors import S3Error
from meshwire.http_values.multipart_form_data import FormError, FormReader, FormTooLargeError, read_boundary
from meshwire.s3.result_types import PostStored
from meshwire.sigv4.post_object import (
    MAX_FORM_FILE_BYTES,
    PostPolicy,
    expand_filename,
    form_headers,
    parse_post_policy,
    read_form_claim,
    read_post_object,
    read_redirect,
    read_status,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
    from typing import Any

    from meshd.auth.identity import Identity
    from meshd.server.s3.request_auth import Authenticator, S3Call
    from meshd.server.services import ServerServices
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.s3.operations import PostObject, PutObject
    from meshwire.sigv4.post_object import FormClaim

_NO_POLICY = PostPolicy(0, (), 0, MAX_FORM_FILE_BYTES)
_OF_CLIENT = frozenset({"referer", "user-agent"})


class PostObjectHandler:
    """Executes PostObject. One per process; stateless."""

    def __init__(self, deps: ServerServices, authenticator: Authenticator) -> None:
        self._deps, self._authenticator = deps, authenticator

    async def __call__(self, call: S3Call, operation: PostObject) -> PostStored:
        """Store the file of a form. Raises S3Error: MalformedPOSTRequest, AccessDenied,
        InvalidPolicyDocument, EntityTooLarge and others, and what storing raises."""
        if call.identity is not ANONYMOUS_IDENTITY:
            raise S3Error("InvalidArgument", "A form is signed by its policy field, not by header or query.")
        form = _Form(call, operation.content_type)
        try:
            return await self._store(call, operation, form)
        finally:
            await form.aclose()

    async def _store(self, call: S3Call, operation: PostObject, form: _Form) -> PostStored:
        await form.read_fields()
        fields = expand_filename(form.reader.fields, form.reader.filename)
        claim = read_form_claim(form.reader.fields)
        identity, policy = self._check_policy(call, operation.bucket, claim, fields)
        put = read_post_object(fields, operation.bucket, call.head.headers)
        call.trace.target = put
        await self._forward_to_owner(call, put, form)
        headers = _policy_headers(call.context.headers, fields)
        context = call.context._replace(headers=headers, form=True, signature=_signature(claim))
        self._deps.access.authorize(identity, put, context)
        admitted: Any = self._deps.acls.resolve_operation(put)
        form.policy = policy
        stored = await self._deps.objects.put_object(admitted, identity, form, context=call.write_context)
        return PostStored(
            put.bucket,
            put.key,
            stored.etag,
            call.url(put.bucket, put.key),
            read_status(fields),
            read_redirect(fields),
            stored.version,
            stored.checksums,
            stored.checksum_type,
        )

    async def _forward_to_owner(self, call: S3Call, put: PutObject, form: _Form) -> None:
        """Forward the form to the primary of its key. Raises AlreadyAnsweredError if that has answered,
        MisdirectedError if another node should have been asked."""
        forwarder = self._deps.forwarder
        if self._deps.mesh.single_node or forwarder is None:
            return
        name = ObjectName(put.bucket, put.key, reading=False)
        if call.hop is not None:
            await forwarder.receiver.require_local(name, call.hop)
        elif not may_answer(self._deps.mesh, name):
            begun = PartialBody(form.received, form.source)
            reply = await forwarder.forward(
                call.request, call.head, name, call.trace, call.write_context, begun=begun
            )
            if reply is None:
                raise S3Error("SlowDown", "The owners of this name are changing; try again.")
            call.trace.mark_forwarded()
            raise AlreadyAnsweredError(reply)

    def _check_policy(
        self, call: S3Call, bucket: str, claim: FormClaim | None, fields: dict[str, str]
    ) -> tuple[Identity, PostPolicy]:
        """Return the signer and the policy; a form without a policy is anonymous."""
        if claim is None:
            return call.identity, _NO_POLICY
        identity = self._authenticator.authenticate_form(claim, call.trace)
        policy = parse_post_policy(claim.policy)
        policy.check(fields, bucket, self._deps.clock.now_ms())
        return identity, policy


def _policy_headers(sent: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that policies see. The upload is defined by the form: an x-amz-* header of the
    request has no effect, so it does not count; and a form field cannot claim where a browser comes from."""
    own = {n: value for n, value in sent.items() if not n.startswith("x-amz-") or n in EXPECTED_OWNER_HEADERS}
    return own | {n: value for n, value in form_headers(fields).items() if n not in _OF_CLIENT}


def _signature(claim: FormClaim | None) -> str:
    """Return the signature version as policies name it."""
    if claim is None:
        return ""
    return SIGV2_NAME if claim.scope is None else SIGV4_NAME


class _Form:
    """The file of a form, as the body of a PUT (`meshd.core.object_io.Body`)."""

    def __init__(self, call: S3Call, content_type: str) -> None:
        self.policy = _NO_POLICY
        try:
            self.reader = FormReader(read_boundary(content_type))
        except FormError as error:
            raise _malformed_error(error) from None
        self.source = call.body.iter_raw()
        self.received: list[bytes] = []
        """The received parts of the form: its fields and perhaps some of its file."""
        self._first: list[bytes] = []
        self._digest: BodyDigest | None = None

    @property
    def size(self) -> int | None:
        return None

    async def aclose(self) -> None:
        """Stop reading."""
        await self.source.aclose()

    async def read_fields(self) -> None:
        """Read up to the beginning of the file. Raises S3Error."""
        async for data in self.source:
            self.received.append(data)
            self._first = self._feed(data)
            if self.reader.in_file:
                return
        self._finish()

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(digests, extra=also)
        async for block in hashed_blocks(self._file(), verifier):
            yield block
        digest = verifier.finish()
        if digest.size < self.policy.least:
            size, least = str(digest.size), str(self.policy.least)
            raise S3Error("EntityTooSmall", extra={"ProposedSize": size, "MinSizeAllowed": least})
        self._digest = digest

    def digest(self) -> BodyDigest:
        if self._digest is None:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        raise S3Error("NotImplemented")

    async def _file(self) -> AsyncIterator[bytes]:
        """Yield the file's bytes; what follows is read and dropped, so that the connection can be kept."""
        size = 0
        pieces, self._first = self._first, []
        while True:
            for piece in pieces:
                size += len(piece)
                if size > self.policy.most:
                    extra = {"ProposedSize": str(size), "MaxSizeAllowed": str(self.policy.most)}
                    raise S3Error("EntityTooLarge", extra=extra)
                yield piece
            data = await anext(self.source, None)
            if data is None:
                break
            pieces = self._feed(data)
        self._finish()

    def _feed(self, data: bytes) -> list[bytes]:
        try:
            return self.reader.feed(data)
        except FormTooLargeError:
            raise S3Error("MaxPostPreDataLengthExceededError") from None
        except FormError as error:
            raise _malformed_error(error) from None

    def _finish(self) -> None:
        try:
            self.reader.finish()
        except FormError as error:
            raise _malformed_error(error) from None


def _malformed_error(error: FormError) -> S3Error:
    return S3Error("MalformedPOSTRequest", f"The body of your POST request is malformed: {error}.")
