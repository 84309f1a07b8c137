"""Plans of jobs: every file once, samples whole, and shards that are those of a view with the same layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.fields import sample_key
from meshwire.formats.shard_encoding import SourceObject
from meshwire.jobs.job_plan import FileList, JobPlan
from meshwire.strict_json import PlanError
from meshwire.views.shard_view import ShardsView, lay_out_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

names = st.lists(
    st.tuples(st.sampled_from("abcdeé"), st.integers(0, 30), st.sampled_from(["jpg", "cls", "seg.png"])).map(
        lambda parts: f"{parts[0]}/{parts[1]:03d}.{parts[2]}"
    ),
    min_size=1,
    max_size=60,
    unique=True,
).map(lambda keys: sorted(keys, key=str.encode))
layouts = st.builds(
    ShardsView,
    source=st.just("b"),
    count=st.integers(1, 9),
    shuffle=st.none() | st.integers(0, 9),
    where=st.sampled_from(["", "size > 300", 'ext == "jpg"']),
    group=st.sampled_from(["", 'part(key, "/", 0)']),
    split=st.sampled_from([(), (("train", 0.7), ("val", 0.3))]),
) | st.builds(
    ShardsView, source=st.just("b"), count=st.just(0), size=st.integers(1024, 9000), shuffle=st.none()
)


def listed(keys: Sequence[str]) -> tuple[FileList, list[SourceObject]]:
    found, objects = FileList(), []
    for key in keys:
        size = len(key) * 37
        objects.append(SourceObject(key, f"etag-{key}", size))
        found.add(objects[-1], [key], np.zeros(1, dtype=np.int64), np.array([size]))
    return found, objects


@given(names, layouts)
def test_shards_are_those_of_the_view(keys: list[str], layout: ShardsView) -> None:
    found, objects = listed(keys)
    plan = found.plan_shards(layout, "", ".tar")
    view = lay_out_shards(layout, objects)
    made = {plan.outputs[i]: [item.name for item in plan.files_of_output(i)] for i in range(len(plan))}
    assert made == {key: [item.key for item in shard.members] for key, shard in view.shards.items()}


@given(names, layouts)
def test_every_file_once_and_samples_whole(keys: list[str], layout: ShardsView) -> None:
    plan = listed(keys)[0].plan_shards(layout, "out/", ".tar")
    placed = {item.name: output for output in range(len(plan)) for item in plan.files_of_output(output)}
    assert len(plan.names) == len(placed)
    assert set(placed) <= set(keys)
    assert layout.where or len(placed) == len(keys)
    homes: dict[str, set[int]] = {}
    for name, output in placed.items():
        homes.setdefault(sample_key(name)[0], set()).add(output)
    assert all(len(found) == 1 for found in homes.values())
    assert int(plan.samples.sum()) == len(homes)


@given(names, layouts)
def test_documents_give_the_plan_back(keys: list[str], layout: ShardsView) -> None:
    plan = listed(keys)[0].plan_shards(layout, "out/", ".tar")
    again = JobPlan.from_bytes(plan.to_bytes())
    assert again.to_bytes() == plan.to_bytes()
    assert [again.output_digest(i, "tar") for i in range(len(again))] == [
        plan.output_digest(i, "tar") for i in range(len(plan))
    ]


def test_a_digest_is_of_one_content() -> None:
    layout = ShardsView("b", count=2)
    plan = listed(["a/1.jpg", "a/2.jpg", "a/3.jpg", "a/4.jpg"])[0].plan_shards(layout, "", ".tar")
    other = listed(["a/1.jpg", "a/2.jpg", "a/3.jpg", "a/5.jpg"])[0].plan_shards(layout, "", ".tar")
    assert plan.output_digest(0, "tar") == other.output_digest(0, "tar")
    assert plan.output_digest(1, "tar") != other.output_digest(1, "tar")
    assert plan.output_digest(0, "tar") != plan.output_digest(0, "zip")


def test_names_that_stand_twice_are_found() -> None:
    found = FileList(archives=True)
    for key in ("a/x.tar", "b/x.tar"):
        rows = np.array([0, 1024])
        found.add(SourceObject(key, key, 4096), ["1.jpg", f"{key[0]}.jpg"], rows, rows)
    with pytest.raises(PlanError, match=r"'x/1.jpg' is in both a/x.tar and b/x.tar"):
        found.plan_file_outputs("")


def test_samples_of_one_name_in_two_archives_are_kept_apart() -> None:
    found = FileList(archives=True)
    rows = np.array([0, 1024])
    found.add(SourceObject("x.tar", "x", 4096), ["1.jpg", "2.jpg"], rows, rows)
    found.add(SourceObject("y.tgz", "y", 4096), ["1.cls", "3.jpg"], rows, rows)
    assert list(found.plan_file_outputs("to/").outputs) == [
        "to/x/1.jpg",
        "to/2.jpg",
        "to/y/1.cls",
        "to/3.jpg",
    ]
