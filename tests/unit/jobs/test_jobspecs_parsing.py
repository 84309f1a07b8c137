"""Documents of jobs: what is taken, what is refused and where, when two are the same job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwire.dataset.archive_paths import archive_stem
from meshwire.jobs.job_spec import is_archive, parse_job
from meshwire.strict_json import PlanError

SHARD: dict[str, Any] = {"kind": "shard", "source": "s3://photos/train", "target": "s3://shards/v1"}


def test_canonical_document_is_parsed_to_itself() -> None:
    spec = parse_job(SHARD | {"count": 10, "shuffle": 3, "split": {"a": 0.5, "b": 0.5}, "match": [".jpg"]})
    assert parse_job(spec.to_json()) == spec
    assert (spec.source.prefix, spec.target.prefix) == ("train/", "v1/")
    assert json.loads(spec.to_json())["split"] == {"a": 0.5, "b": 0.5}


def test_the_same_job_has_one_name() -> None:
    short = parse_job(SHARD)
    long = parse_job(
        {"target": "s3://shards/v1/", "kind": "shard", "count": 1000, "source": "s3://photos/train/"}
    )
    assert short.job_id("anna") == long.job_id("anna")
    assert short.job_id("anna") != short.job_id("bert")
    assert short.job_id("anna") != parse_job(SHARD | {"count": 999}).job_id("anna")


def test_a_job_at_another_rate_is_the_same_job() -> None:
    quick = parse_job({"kind": "prefetch", "source": "s3://photos/"})
    slow = parse_job({"kind": "prefetch", "source": "s3://photos/", "rate": 5})
    assert quick.job_id("anna") == slow.job_id("anna")
    assert (parse_job(slow.to_json()).rate, b"rate" in quick.to_json()) == (5, False)
    with pytest.raises(PlanError) as error:
        parse_job({"kind": "prefetch", "source": "s3://photos/", "rate": -1})
    assert error.value.path == "rate"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"kind": "sort"}, "kind"),
        ({"counts": 1}, "counts"),
        ({"names": "archive"}, "names"),
        ({"count": 0}, "count"),
        ({"count": 3, "size": 4096}, "size"),
        ({"source": "photos/train"}, "source"),
        ({"source": "s3://"}, "source"),
        ({"source": "s3://UPPER/x"}, "source"),
        ({"target": "s3://photos/train/shards"}, "target"),
        ({"target": "s3://shards/one.tar"}, "target"),
        ({"target": 7}, "target"),
        ({"format": "rar"}, "format"),
        ({"on_bad": "substitute"}, "on_bad"),
        ({"split": {"a": 0.3}}, "split"),
        ({"shuffle": -1}, "shuffle"),
        ({"match": ["jpg"]}, "match[0]"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_job(SHARD | change)
    assert error.value.path == path


def test_archives_by_their_names() -> None:
    assert archive_stem("a/b.v1.tar.gz") == "a/b.v1"
    assert archive_stem("a/b.TAR.ZST") == "a/b"
    assert archive_stem("plain.jpg") == "plain.jpg"
    assert not is_archive("a.tar.txt")
    assert parse_job(SHARD | {"kind": "reshard", "source": "s3://photos/x.tgz"}).source.prefix == "x.tgz"
