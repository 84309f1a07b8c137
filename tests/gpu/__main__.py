"""`python -m tests.gpu`: everything of the CUDA path, NVTX and NVML on this machine's GPU, in a minute.

Law: prints a line a check and a verdict; exit code 0 when all that could be tried held, 1 when something did
not, 2 when there is no GPU. `--rehearse` tries the checks themselves on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING

import torch

import meshsdk as mesh
from tests.gpu.checking import WITH, WITHOUT, LeftOut, photographs
from tests.gpu.grounds import Gpu, Rehearsal
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.gpu.grounds import Ground


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="which GPU [cuda:0]")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: tries the checks on the CPU")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was checked (nvidia-smi; a torch built with CUDA)")
        return 2
    ground: Ground = Rehearsal() if given.rehearse else Gpu(given.device)
    print(_machine(ground), flush=True)
    with (
        Daemon.start() as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        dataset = photographs(client)
        checks = [(check.__name__, partial(check, ground)) for check in WITHOUT]
        checks += [(check.__name__, partial(check, ground, dataset)) for check in WITH]
        failed = [name for name, check in checks if not _held(name, check)]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "holds"
    print(f"verdict: {verdict}{'' if ground.real else ' (rehearsal: says nothing of CUDA)'}")
    return 1 if failed else 0


def _machine(ground: Ground) -> str:
    if not ground.real:
        return f"the CPU, torch {torch.__version__}"
    name, version = torch.cuda.get_device_name(ground.device), torch.version.cuda
    return f"{name}, torch {torch.__version__}, CUDA {version}"


def _held(name: str, check: Callable[[], str]) -> bool:
    try:
        word, seen = "holds", check()
    except LeftOut as why:
        word, seen = "left out", str(why)
    except Exception as error:  # whatever it is, the others are tried
        word, seen = "FAILED", f"{error}\n{traceback.format_exc()}"
    print(f"{word:9} {name:11} {seen}", flush=True)
    return word != "FAILED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
