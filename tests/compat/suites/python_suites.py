"""Suites in Python: of minio-py, s3fs, zarr-python and s3torchconnector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.suites.places import HOUR, Result
from tests.compat.suites.results import NoResultError, of_junit, of_mint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.compat.suites.places import Place

INSIDE = Path(__file__).with_name("inside")
_ANY_CODE = range(256)


def minio_py(place: Place) -> Result:
    """Its functional tests, in the mode in which all are run."""
    environment = {
        "ACCESS_KEY": place.daemon.access_key,
        "SECRET_KEY": place.daemon.secret_key,
        "SERVER_ENDPOINT": place.host,
        "ENABLE_HTTPS": "0",
        "MINT_MODE": "full",
    }
    program = [place.python, str(INSIDE / "minio_functional.py"), str(place.repository)]
    return Result(of_mint(place.run(program, environment=environment)), version(place, "minio"))


def s3fs(place: Place) -> Result:
    """All its tests; where it starts moto, it gets the daemon."""
    outcomes = pytest(place, ["s3fs"], plugins=["moto_daemon"])
    return Result(outcomes, version(place, "s3fs"))


def zarr(place: Place) -> Result:
    """Its tests of the store over fsspec, and its tests of any store over obstore's S3."""
    # That connections are still open when they are collected is no matter of the server's.
    quiet = ["-W", "ignore::pytest.PytestUnraisableExceptionWarning", "-W", "ignore::ResourceWarning"]
    outcomes = pytest(place, [*quiet, "tests/test_store/test_fsspec.py"], plugins=["moto_daemon"])
    config = ["-c", str(place.repository / "pyproject.toml"), "--confcutdir", str(INSIDE)]
    outcomes |= pytest(place, [*quiet, *config, str(INSIDE / "zarr_obstore.py")])
    packages = [f"{name} {version(place, name)}" for name in ("s3fs", "obstore")]
    return Result(outcomes, version(place, "zarr"), f"over {' and '.join(packages)}")


def s3torchconnector(place: Place) -> Result:
    """Its end-to-end tests, of one process, of several, of distributed checkpoints and of Lightning's. Each
    file in a process of its own: some fork, which the client's threads of an earlier file do not survive."""
    place.daemon.client().create_bucket(Bucket="torch-suite")
    environment = {
        "CI_BUCKET": "torch-suite",
        "CI_PREFIX": "suite/",
        "CI_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": place.daemon.endpoint,  # boto3's, with which the tests look
        "PYTHONPATH": str(INSIDE / "torch_endpoint"),
    }
    folder = place.repository / "s3torchconnector"
    outcomes: dict[str, str] = {}
    for file in sorted(folder.glob("tst/e2e/**/test_*.py")):
        if "def test_" in file.read_text():
            outcomes |= pytest(place, [str(file)], cwd=folder, environment=environment)
    return Result(outcomes, version(place, "s3torchconnector"), f"torch {version(place, 'torch')}")


def pytest(
    place: Place,
    arguments: Sequence[str],
    *,
    plugins: Sequence[str] = (),
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Outcomes of what pytest runs in the checkout, each test for two minutes at most."""
    report = place.scratch / f"report-{len(list(place.scratch.glob('report-*')))}.xml"
    chosen = [part for plugin in plugins for part in ("-p", plugin)]
    options = ["-p", "no:cacheprovider", "--timeout=120", f"--junitxml={report}"]
    log = place.run(
        [place.python, "-m", "pytest", "-q", *chosen, *options, *arguments],
        cwd=cwd or place.repository,
        environment={"PYTHONPATH": str(INSIDE), **(environment or {})},
        limit=HOUR,
        codes=_ANY_CODE,
    )
    if not report.exists():
        raise NoResultError(f"pytest did not come to its end:\n{log[-3000:]}")
    return of_junit(report.read_text())


def version(place: Place, package: str) -> str:
    """Of a package in the suite's environment."""
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    return place.run([place.python, "-c", program, package], limit=60).strip()
