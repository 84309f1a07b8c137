"""What keeps a daemon from starting, in one word, and what is to be done about it: made of what Kubernetes
says (`troubles`). Pure.

Law: words come from a table alone, so that metrics and events can be labelled by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshoperator.steering import Pod


class Diagnosis(NamedTuple):
    """`word`: a reason; `signs`: one of them is in what Kubernetes says; `advice`: may name `{pod}` and
    `{namespace}`."""

    word: str
    signs: tuple[str, ...]
    advice: str


_STARTING: Final = ("", "ContainerCreating", "PodInitializing")
_OTHER: Final = Diagnosis("Other", ("",), "kubectl -n {namespace} describe pod {pod}")
_TABLE: Final = (
    Diagnosis(
        "Volume",
        ("PersistentVolumeClaim", "has no place: its volume", "FailedAttachVolume", "FailedMapVolume"),
        "kubectl -n {namespace} describe pvc; name a storage class that is there and has room, in "
        "volumeClaim.storageClass",
    ),
    Diagnosis(
        "NoPlace",
        ("has no place",),
        "add a machine with the pool's labels and room, or make replicas of the pool smaller",
    ),
    Diagnosis(
        "Image",
        (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "ErrImageNeverPull",
            "ImageInspectError",
            "RegistryUnavailable",
        ),
        "put the image right, or name the registry's Secret in imagePullSecrets",
    ),
    Diagnosis(
        "Reference",
        ("CreateContainerConfigError", "FailedMount"),
        "make what it lacks; the pod then starts by itself",
    ),
    Diagnosis("OutOfMemory", ("(OOMKilled)",), "raise limits.memory in resources of its pool"),
    Diagnosis("Evicted", ("Evicted",), "free what its machine lacks, or reserve it in resources of its pool"),
    Diagnosis(
        "Network",
        ("FailedCreatePodSandBox", "NetworkNotReady"),
        "look at the network plug-in of its machine",
    ),
    Diagnosis(
        "Crash",
        ("CrashLoopBackOff", "it ended with", "RunContainerError", "CreateContainerError", "StartError"),
        "do what its last words say; all of them: kubectl -n {namespace} logs {pod} --previous",
    ),
    _OTHER,
)


def diagnosis(trouble: str) -> Diagnosis:
    """Of what Kubernetes says of a pod."""
    return next(each for each in _TABLE if any(sign in trouble for sign in each.signs))


def stuck(pods: Iterable[Pod]) -> dict[str, Diagnosis]:
    """By name, of those that do not start and of which Kubernetes says why."""
    return {
        pod.name: diagnosis(pod.trouble)
        for pod in sorted(pods, key=lambda pod: pod.name)
        if pod.trouble.partition(":")[0] not in _STARTING and not pod.ready and not pod.leaving
    }


def advised(found: dict[str, Diagnosis], namespace: str) -> str:
    """What is to be done, each thing once."""
    first = {each.word: (each, pod) for pod, each in reversed(found.items())}
    said = [each.advice.format(pod=pod, namespace=namespace) for each, pod in reversed(first.values())]
    return f"to do: {'; '.join(said)}" if said else ""


def brief(found: dict[str, Diagnosis]) -> str:
    """In a few words, for a column: the most frequent reason, with one of its pods."""
    words = [each.word for each in found.values()]
    if not words:
        return ""
    word = max(words, key=words.count)
    pods = [pod for pod, each in found.items() if each.word == word]
    return f"{word}: {pods[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
