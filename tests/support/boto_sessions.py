"""boto3 sessions that share the service descriptions, which are read once per process.

Law: nothing else is shared; a session belongs to one thread, as boto3 requires.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import boto3
import botocore.session

_LOADER = "data_loader"


def boto_session() -> Any:
    """A new one. Its clients cost a tenth of those of a plain session."""
    session = botocore.session.get_session()
    session.register_component(_LOADER, _loader())
    return boto3.session.Session(botocore_session=session)


@cache
def _loader() -> Any:
    return botocore.session.get_session().get_component(_LOADER)
