"""On PYTHONPATH, for s3torchconnector's end-to-end tests: they name a region alone, and get the daemon.

Every interpreter loads a module of this name as it starts, the tests' worker processes, too. The client's own
class stays where it is: pickle looks for it there.
"""

from __future__ import annotations

import os
from typing import Any

from s3torchconnector._s3client import _s3client as clients

_client: Any = clients.MountpointS3Client


def _with_endpoint(*arguments: Any, **options: Any) -> Any:
    if options.get("endpoint") is None:
        options |= {"endpoint": os.environ["MESHD_ENDPOINT"], "force_path_style": True}
    return _client(*arguments, **options)


vars(clients)["MountpointS3Client"] = _with_endpoint
