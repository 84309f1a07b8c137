"""`mesh doctor` times steps of a GPU: what is queued there counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshtools.doctor.measurement_runs import synchronize_gpu
from tests.support.required import required_module
from tests.unit.sdk.test_device_copy import LateLane

if TYPE_CHECKING:
    import pytest


def test_the_doctor_waits_for_the_gpu_that_batches_go_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = required_module("torch")
    from meshsdk.loader.output_stage import DeviceStage

    told: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", told.append)
    synchronize_gpu(DeviceStage(LateLane(device=torch.device("cuda:1"))).device)
    assert told == [torch.device("cuda:1")]
