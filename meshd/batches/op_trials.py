"""Trials of an op (`mesh op test`): applies it twice to chosen objects and stores nothing.

Law: a trial runs in the same processes, with the same limits and errors, as a plan. It requires read
access to the objects only; a draft op must have been pushed by a caller with that right.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from meshd.core.api_errors import BatchError
from meshd.core.frame_address import DerivedAddress
from meshd.datasets.service import invalid_plan
from meshd.transform.compiler import asset_digests, compile_program, complete_spec
from meshwire.plan.plan_spec import OpSpec, parse_spec, spec_document
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.batches.assets import AssetService
    from meshd.batches.user_module_registry import UserModules
    from meshd.core.frame_address import FrameSource
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshd.transform.op_types import FieldType
    from meshd.util.clock import Clock
    from meshwire.plan.plan_spec import PlanSpec

FIELD: Final = "value"
MAX_SAMPLES: Final = 64
MAX_KEPT: Final = 32 << 20
"""Limit of the bytes of results in one response, if the caller requests results."""
SECONDS: Final = 120.0
"""No further sample is started after this time."""


class _Sample(NamedTuple):
    """An object, or `length` bytes of it at `offset`."""

    bucket: str
    key: str
    offset: int = 0
    length: int | None = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class _TrialRequest(msgspec.Struct, frozen=True):
    """A parsed trial request. `ops` of the spec is the whole chain."""

    spec: PlanSpec
    samples: tuple[_Sample, ...]
    results: bool


class OpTrials:
    """Runs op trials for a worker."""

    def __init__(
        self,
        user_ops: UserModules,
        assets: AssetService,
        objects: RemoteObjects,
        readers: DatasetAccess,
        frames: FrameSource,
        clock: Clock,
    ) -> None:
        self._user_ops, self._assets, self._objects = user_ops, assets, objects
        self._readers, self._frames, self._clock = readers, frames, clock

    async def run_trial(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Run a trial and return the answer to `POST /-/modules/test`.

        A failure of a single sample is part of the result of that sample. Raises BatchError InvalidPlan,
        UnknownOp, UnknownOpBuild, AccessDenied, NoSuchBucket, NoSuchKey.
        """
        try:
            request = _parse_request(body)
            spec = complete_spec(await self._assets.pin_assets(caller, request.spec), _no_sample)
            output, spec = await asyncio.to_thread(self._compile_chain, spec)
        except PlanError as error:
            raise invalid_plan(error) from error
        records = [await self._record(caller, sample) for sample in request.samples]
        results = await self._results(spec, request, records)
        return {
            "ops": [{"op": op.op, "version": op.version} for op in spec.ops],
            "output": str(output),
            "results": results,
        }

    def _compile_chain(self, spec: PlanSpec) -> tuple[FieldType, PlanSpec]:
        """Return the output type of the chain, and the chain plus an op that writes its value as bytes."""
        program = compile_program(spec, [FIELD], load=self._assets.load_asset_content)
        program.require_unmixed("look at it in a plan: `ds.map(…)[0]`")
        output = program.outputs[FIELD]
        if output.kind == "bytes":
            return output, spec
        written = complete_spec(replace(spec, ops=(OpSpec("to_npy", FIELD),)), _no_sample).ops
        return output, replace(spec, ops=spec.ops + written)

    async def _record(self, caller: Caller, sample: _Sample) -> Record:
        bucket, key, url = sample.bucket, sample.key, sample.url[:300]
        allowed = self._readers.bulk_access(caller, bucket).allows_key(key)
        record = await self._objects.find(bucket, key) if allowed else None
        if record is None:
            if not allowed or self._readers.missing_key_code(caller, bucket, key) == "AccessDenied":
                raise BatchError("AccessDenied", f"this key may not read {url}")
            raise BatchError("NoSuchKey", f"no object {url}")
        if sample.length is not None and sample.offset + sample.length > record.size:
            raise BatchError("InvalidPlan", f"{url} has only {record.size} bytes")
        return record

    async def _results(
        self, spec: PlanSpec, request: _TrialRequest, records: Sequence[Record]
    ) -> list[dict[str, Any]]:
        """Run each sample twice, the second time in reverse order, which exposes an op that keeps state."""
        began = self._clock.monotonic()
        found: list[dict[str, Any]] = []
        numbers = range(len(records))
        digests: dict[int, str] = {}
        left = MAX_KEPT
        for number in numbers:
            if self._clock.monotonic() - began > SECONDS:
                break
            outcome, data = await self._run_once(spec, request, records, number, 0)
            if data is not None:
                digests[number] = hashlib.sha256(data).hexdigest()
                outcome["sha256"] = digests[number]
                if request.results and len(data) <= left:
                    left -= len(data)
                    outcome["result"] = base64.b64encode(data).decode()
            found.append(outcome)
        for number in reversed(sorted(digests)):
            if self._clock.monotonic() - began > SECONDS:
                break
            _, data = await self._run_once(spec, request, records, number, 1)
            again = None if data is None else hashlib.sha256(data).hexdigest()
            found[number]["repeats"] = again == digests[number]
        return found

    async def _run_once(
        self, spec: PlanSpec, request: _TrialRequest, records: Sequence[Record], number: int, run: int
    ) -> tuple[dict[str, Any], bytes | None]:
        sample = request.samples[number]
        began = self._clock.monotonic()
        outcome: dict[str, Any] = {"sample": sample.url}
        try:
            data = await self._apply_ops(spec, sample, records[number], number, run)
        except BatchError as error:
            if error.code not in ("BadSample", "OpFailed"):
                raise
            failed = {"code": error.code, "op": error.detail.get("op", ""), "error": error.message}
            return outcome | failed, None
        outcome |= {"size": len(data), "seconds": round(self._clock.monotonic() - began, 6)}
        return outcome, data

    async def _apply_ops(
        self, spec: PlanSpec, sample: _Sample, record: Record, number: int, run: int
    ) -> bytes:
        document: Mapping[str, Any] = {"spec": spec_document(spec), "fields": [FIELD]}
        name = f"test-{hashlib.sha256(canonical_json(document)).hexdigest()}"
        once = {**document, "run": [self._clock.now_ms(), run]}  # a different text forces a new frame
        address = DerivedAddress(
            name,
            canonical_json(once).decode(),
            sample.bucket,
            sample.key,
            record.etag,
            number,
            asset_digests(spec),
            sample.offset,
            sample.length,
        )
        frame = await self._frames.get_frame(address)
        try:
            return await asyncio.to_thread(os.pread, frame.fd, frame.size, 0)
        finally:
            frame.close()


def _parse_request(body: bytes) -> _TrialRequest:
    document = checked_object(read_json(body), "", ("ops", "samples", "seed", "results"))
    given = required_field(document, "ops", "")
    if not isinstance(given, list) or not all(isinstance(op, dict) for op in given):
        raise PlanError("ops", 'expected a list of ops, as [{"op": "decode"}, {"op": "mine/brighten"}]')
    ops = [{**op, "field": FIELD} for op in given]
    seed = checked_integer(document.get("seed", 0), "seed", 0, MAX_INTEGER)
    samples = required_field(document, "samples", "")
    if not isinstance(samples, list) or not 1 <= len(samples) <= MAX_SAMPLES:
        raise PlanError("samples", f"expected a list of 1…{MAX_SAMPLES} addresses such as s3://BUCKET/KEY")
    named = tuple(_parse_sample(item, f"samples[{number}]") for number, item in enumerate(samples))
    return _TrialRequest(parse_spec({"ops": ops, "seed": seed}), named, document.get("results") is True)


def _parse_sample(value: Any, path: str) -> _Sample:
    """Read `"s3://BUCKET/KEY"`, or `{"url": …, "offset": …, "length": …}` for a part of the object."""
    given = checked_object(value, path, ("url", "offset", "length")) if isinstance(value, dict) else {}
    url = checked_text(given.get("url", "") if given else value, path, at_most=1200)
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or not key:
        raise PlanError(path, f"expected s3://BUCKET/KEY, got {url[:80]!r}")
    if not given:
        return _Sample(bucket, key)
    bounds = [checked_integer(given.get(name), path, 0, MAX_INTEGER) for name in ("offset", "length")]
    return _Sample(bucket, key, *bounds)


def _no_sample(field: str) -> bytes:
    raise KeyError(field)
