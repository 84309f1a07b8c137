"""On PYTHONPATH, for s3torchconnector's end-to-end tests: they name a region alone, and get the daemon.

Every interpreter loads a module of this name as it starts, the tests' worker processes, too.
"""

from __future__ import annotations

import os
from typing import Any

from s3torchconnectorclient import _mountpoint_s3_client as native

_client: Any = native.MountpointS3Client


def _with_endpoint(*arguments: Any, **options: Any) -> Any:
    if options.get("endpoint") is None:
        options |= {"endpoint": os.environ["MESHD_ENDPOINT"], "force_path_style": True}
    return _client(*arguments, **options)


vars(native)["MountpointS3Client"] = _with_endpoint
