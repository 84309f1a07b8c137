"""Job API: start, list, wait for and cancel jobs (`/-/jobs`).

A handler parses, calls the job service and answers JSON with the batch API's errors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshd.core.api_errors import BatchError
from meshd.server.api import reply_types
from meshd.server.api.json_api import caller_of, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.jobs.job_service import JobService
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply

_PREFIX = "/-/jobs/"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class JobEndpoint:
    """The job API. One instance per worker."""

    def __init__(self, service: JobService, api: JsonApi) -> None:
        self._service, self._api = service, api

    def routes(self) -> list[HttpRoute]:
        guarded = self._api.handle_errors
        return [
            HttpRoute("POST", "/-/jobs", guarded(self.start)),
            HttpRoute("GET", "/-/jobs", guarded(self.list_all)),
            HttpRoute("GET", _PREFIX, guarded(self.show)),
            HttpRoute("DELETE", _PREFIX, guarded(self.cancel)),
        ]

    @operation("/-/jobs", "Start a job", accepts="json", reply=reply_types.Job)
    async def start(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        return self._api.reply_json(
            await self._service.start(caller_of(request, identity), await request.read())
        )

    @operation("/-/jobs", "The jobs of the caller", reply=reply_types.Jobs)
    async def list_all(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        return self._api.reply_json({"jobs": self._service.list_all(caller_of(request, identity))})

    @operation("/-/jobs/{job}", "A job", query=("wait",), reply=reply_types.Job)
    async def show(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer a job; with `?wait=SECONDS`, once it has ended or after that time."""
        wait = parse_query(request, ("wait",)).get("wait", "0")
        if _SECONDS.fullmatch(wait) is None:
            raise BatchError("BadRequest", f"wait must be a number of seconds, not {wait[:40]!r}")
        caller = caller_of(request, identity)
        return self._api.reply_json(await self._service.wait(caller, _job_id(request), float(wait)))

    @operation("/-/jobs/{job}", "Cancel a job", query=("pause",), reply=reply_types.Job)
    async def cancel(self, request: MeshRequest, identity: Identity) -> Reply:
        """Cancel a job; with `?pause=1` it can be started again."""
        pause = parse_query(request, ("pause",)).get("pause", "0")
        if pause not in {"0", "1"}:
            raise BatchError("BadRequest", f"pause must be 0 or 1, not {pause[:40]!r}")
        caller = caller_of(request, identity)
        found = await self._service.cancel(caller, _job_id(request), pause=pause == "1")
        return self._api.reply_json(found)


def _job_id(request: MeshRequest) -> str:
    return request.raw_path.partition("?")[0].removeprefix(_PREFIX)
