"""Why daemons do not start: from statuses of pods to a word, and what is to be done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshoperator import metrics
from meshoperator.controllers.cluster_controller import StuckPodEvents
from meshoperator.controllers.observed_state import pod_problem
from meshoperator.kube.leader_election import LeaderElection
from meshoperator.planners.cluster_state import Pod
from meshoperator.planners.exit_message import exit_message
from meshoperator.planners.status import _TABLE, advice_text, brief_text, diagnosis, stuck_pods

MESH: Any = {"metadata": {"namespace": "ns", "name": "mesh", "uid": "m"}}


def pod(number: int, said: str, *, ready: bool = False, leaving: bool = False) -> Pod:
    return Pod(f"mesh-s-{number}", "s", "", ready, True, "k", leaving, False, f"u{number}", said)


def waits(reason: str, **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason} | more}}


@pytest.mark.parametrize(
    ("status", "said", "word"),
    [
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
            "Evicted: low on memory",
            "Evicted",
        ),
        (
            {
                "initContainerStatuses": [waits("ErrImagePull")],
                "containerStatuses": [waits("PodInitializing")],
            },
            "ErrImagePull",
            "Image",
        ),
        (
            {
                "initContainerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}],
                "containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
            },
            "exited with 137 (OOMKilled)",
            "OutOfMemory",
        ),
        (
            {"containerStatuses": [waits("RunContainerError", message="exec format error")]},
            "RunContainerError: exec format error",
            "Crash",
        ),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError", "Other"),
    ],
)
def test_what_kubernetes_says_and_what_it_is(status: dict[str, Any], said: str, word: str) -> None:
    assert pod_problem(status) == said
    assert diagnosis(said).word == word


def test_the_exit_message_is_the_end_of_the_log() -> None:
    """What it said first was a warning; why it ended is at the end of its log."""
    noise = '{"time":"t","level":"warning","logger":"meshd","message":"chmod 700 it","path":"/d"}'
    cause = "meshd: joining failed: /var/lib/meshd/home is empty: start it on its previous directory"
    state = {"exitCode": 2, "message": "\n".join([*[noise] * 5, cause, ""])}
    said = pod_problem({"containerStatuses": [{"state": {"terminated": state}}]})
    assert said == f"exited with 2: {cause}"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ('{"level":"info","message":"a"}\n{"level":"warning","message":"b","n":1}\n', "a / b n=1"),
        ('{"level":"info","message":"a"}\n{"level":"critical","message":"b"}\nc', "b / c"),
        ("Traceback (most recent call last):\n" + "x\n" * 200 + "ValueError: y", "ValueError: y"),
        ("y" * 500, "y" * 239 + "…"),
        ("x" * 300 + "\nlast", "last"),
        ('{"no":"message"}\n[1]', '{"no":"message"} / [1]'),
    ],
)
def test_words_that_fit_and_matter(log: str, said: str) -> None:
    assert exit_message(log).endswith(said)
    assert len(exit_message(log)) <= 240


def test_who_starts_is_ready_or_goes_is_not_stuck() -> None:
    pods = [
        pod(0, "ContainerCreating"),
        pod(1, "PodInitializing"),
        pod(2, ""),
        pod(3, "ErrImagePull", ready=True),
        pod(4, "ErrImagePull", leaving=True),
    ]
    assert stuck_pods(pods) == {}
    assert (brief_text({}), advice_text({}, "ns")) == ("", "")


def test_a_column_names_the_most_frequent_and_advice_is_said_once() -> None:
    found = stuck_pods(
        [pod(0, "is unschedulable: x"), pod(1, "ErrImagePull: y"), pod(2, "ImagePullBackOff: y")]
    )
    assert brief_text(found) == "Image: mesh-s-1 and 2 more"
    assert advice_text(found, "ns").count("correct the image") == 1
    assert "add a machine" in advice_text(found, "ns")


def test_every_advice_can_be_said() -> None:
    for each in _TABLE:
        assert each.advice.format(pod="p", namespace="n").strip()


def test_events_wait_until_it_lasts_and_are_said_once() -> None:
    now, heard = ["2030-01-01T00:00:00Z"], list[tuple[str, str, str]]()

    class Ear:
        async def record_event(self, about: Any, reason: str, message: str, *, once: str = "") -> None:
            heard.append((reason, message, once))

    complaints = StuckPodEvents(Ear(), lambda: now[0])

    def run(*pods: Pod) -> int:
        heard.clear()
        asyncio.run(complaints.record_events(MESH, pods))
        return len(heard)

    bad = pod(0, "ImagePullBackOff: z")
    assert run(bad) == 0
    now[0] = "2030-01-01T00:00:59Z"
    assert run(bad) == 0
    now[0] = "2030-01-01T00:01:00Z"
    assert run(bad) == 1
    assert heard == [
        (
            "DaemonStuck",
            "mesh-s-0 ImagePullBackOff: z; to do: correct the image, or name the registry's Secret in "
            "imagePullSecrets",
            "u0/Image",
        )
    ]
    now[0] = "2030-01-01T00:02:00Z"
    assert run(bad, pod(1, "Evicted")) == 0
    assert run() == 0
    assert run(pod(1, "Evicted")) == 0  # well in between: it begins anew
    now[0] = "2030-01-01T00:03:00Z"
    assert run(pod(1, "Evicted")) == 1


def test_metrics_are_of_those_that_are_stuck_now() -> None:
    def there() -> set[tuple[str, ...]]:
        return {key for key in metrics.stuck._metrics if key[0] == "ns-stuck"}

    metrics.record_stuck("ns-stuck", "mesh", stuck_pods([pod(0, "ErrImagePull"), pod(1, "Evicted")]))
    assert there() == {("ns-stuck", "mesh", "mesh-s-0", "Image"), ("ns-stuck", "mesh", "mesh-s-1", "Evicted")}
    metrics.record_stuck("ns-stuck", "mesh", stuck_pods([pod(0, "exited with 1: x")]))
    assert there() == {("ns-stuck", "mesh", "mesh-s-0", "Crash")}
    metrics.forget_cluster("ns-stuck", "mesh")
    assert there() == set()


def test_an_operator_that_does_not_lead_tells_nothing_of_clusters() -> None:
    metrics.record_stuck("ns-lost", "mesh", stuck_pods([pod(0, "ErrImagePull")]))
    leading: Any = LeaderElection(None, "ns", "lease", "me", stamp=str, monotonic=float)  # type: ignore[arg-type]
    leading._tell(False)
    assert not [key for key in metrics.stuck._metrics if key[0] == "ns-lost"]
