"""boto3 sessions: one a thread, because building one costs more than a client, and ten requests.

Law: a session is used by one thread alone, as boto3 requires; service descriptions are read once per process.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import boto3
import botocore.session

_LOADER = "data_loader"
_own = threading.local()


def boto_session() -> Any:
    """This thread's session. A client has its own hooks, credentials and connections."""
    if not hasattr(_own, "session"):
        session = botocore.session.get_session()
        session.register_component(_LOADER, _loader())
        _own.session = boto3.session.Session(botocore_session=session)
    return _own.session


@cache
def _loader() -> Any:
    return botocore.session.get_session().get_component(_LOADER)
