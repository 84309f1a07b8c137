"""The checks of the CUDA path, tried without a GPU: they run, and a lane that breaks its law fails them."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import pytest
import torch

from tests.gpu.__main__ import main
from tests.gpu.checking import copies
from tests.gpu.grounds import PromptLane, Rehearsal


def test_a_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--rehearse"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "verdict: holds (rehearsal: says nothing of CUDA)" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("holds")] == [
        "copies",
        "normalised",
        "training",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "nothing was checked" in capsys.readouterr().out


class HastyLane(PromptLane):
    """Says that a copy was made before it was."""

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[tuple[Any, int, int]] = deque()

    def copy(self, array: Any) -> Any:
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype)
        self._late.append((tensor, array.ctypes.data, array.nbytes))
        return tensor

    def join(self, mark: Any, tensors: Any) -> None:
        if len(self._late) > 4:
            tensor, address, size = self._late.popleft()
            ctypes.memmove(tensor.data_ptr(), address, size)


def test_a_lane_that_says_too_early_that_it_copied_is_found() -> None:
    with pytest.raises(AssertionError, match="have other bytes"):
        copies(Rehearsal(), HastyLane(), 20)
