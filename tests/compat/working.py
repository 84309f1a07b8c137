"""Where clients work: their environments, the server's side, and one job run to its end.

Law: the only place that knows how a driver is started. Invariant: nothing of the developer's AWS settings
reaches a client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import traceback
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import meshsdk as mesh
from tests.compat.clients import DEV
from tests.compat.homes import HOMES_AT, node
from tests.compat.jobs import JOBS, MANY, Work
from tests.compat.talking import DRIVERS, CannotError, Conversation

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

    from tests.compat.clients import Client
    from tests.support.daemons import Daemon

REGION = "us-east-1"
RUNTIME = ("GOGC", "GOMAXPROCS")
"""How programs in Go use the processors, as `tests/conftest.py` sets it: of the machine, not of AWS."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`verdict`: "ok", "cannot" (no such call) or "failed"; `why` for those two, else a note."""

    verdict: str
    why: str = ""


def command(client: Client) -> list[str]:
    """How the client's driver is started."""
    driver = str(DRIVERS / client.driver)
    if client.driver.endswith(".mjs"):
        return [node(), driver]
    python = sys.executable if client.home == DEV else str(HOMES_AT / client.home / "bin" / "python")
    return [python, "-W", "ignore", driver]


@contextlib.contextmanager
def conversation(client: Client, daemon: Daemon, scratch: Path) -> Iterator[Conversation]:
    """The client's driver, running, in an empty folder of its own."""
    scratch.mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "COMPAT_NODE_HOME": str(HOMES_AT / "node"),
    }
    environment |= {name: os.environ[name] for name in RUNTIME if name in os.environ}
    if ca := daemon.ca_cert:
        # The names under which programs look for certificate authorities; each takes the one it knows.
        environment |= dict.fromkeys(("SSL_CERT_FILE", "AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"), ca)
    where = {
        "url": daemon.endpoint,
        "access_key": daemon.access_key,
        "secret_key": daemon.secret_key,
        "region": REGION,
        "ca": ca,
        "scratch": str(scratch),
    }
    with Conversation(command(client), where, environment, scratch.parent / f"{scratch.name}.log") as talk:
        yield talk


@dataclass(frozen=True, slots=True)
class Ground:
    """Where jobs are done: the oracle, a bucket of MANY keys, a folder that comes and goes, and whom to trust
    over TLS."""

    s3: Any
    many: str
    folder: Path
    trust: ssl.SSLContext | None = None


def judged(name: str, talk: Conversation, ground: Ground) -> Outcome:
    """One job in a bucket of its own, to its end."""
    bucket = f"compat-{uuid.uuid4().hex[:16]}"
    ground.s3.create_bucket(Bucket=bucket)
    ground.folder.mkdir(parents=True, exist_ok=True)
    work = Work(talk, bucket, ground.s3, ground.many, ground.folder, ground.trust)
    try:
        JOBS[name](work)
    except CannotError as error:
        return Outcome("cannot", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error} ({_line(error)})")
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(ground.folder)
    return Outcome("ok", "; ".join(work.notes))


def _line(error: BaseException) -> str:
    """The line of the job that failed."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("jobs.py")
    ]
    return f"jobs.py:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def fill(daemon: Daemon, s3: Any) -> str:
    """A bucket of MANY small objects; its name."""
    bucket = f"compat-many-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=bucket)
    with mesh.connect(
        daemon.endpoint,
        access_key=daemon.access_key,
        secret_key=daemon.secret_key,
        ca_cert=daemon.ca_cert or None,
    ) as client:
        assert client.put_many(bucket, [(f"many/{number:05}", b"x") for number in range(MANY)]) == MANY
    return bucket
