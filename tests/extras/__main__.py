"""Installs each extra outside of the checkout with its lowest and its newest versions, and uses it a little.

    python -m tests.extras [--resolution lowest|newest] [--python python3.12] [EXTRA …]

Law: the wheel is what is installed, in an empty environment, and what is run knows nothing of this checkout.
Extras that need torch are tried when they are named: it is a gigabyte.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).parents[2]
PATIENCE: Final = 1800.0
RESOLUTIONS: Final = {"lowest": "lowest-direct", "newest": "highest"}
"""In the words of uv, since pip knows no lowest one. Indirect requirements are the newest."""
_SERVE: Final = """
import re, subprocess, sys, tempfile
from pathlib import Path
import meshsdk as mesh
folder = tempfile.mkdtemp()
meshd = Path(sys.executable).with_name("meshd")
command = [meshd, "serve", "--data-dir", folder, "--listen", "127.0.0.1:0", "--workers", "1", *sys.argv[1:]]
node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
said = ""
while "meshd ready" not in said:
    line = node.stdout.readline()
    assert line, said
    said += line
endpoint = re.search(r"ready endpoint=(\\S+)", said)[1]
keys = re.search(r"access_key=(\\S+) secret_key=(\\S+)", said)
with mesh.connect(endpoint, access_key=keys[1], secret_key=keys[2]) as client:
    client.create_bucket("extras")
    client.put("extras", "key", b"data")
    assert bytes(client.get("extras", "key")) == b"data"
node.terminate()
assert node.wait(60) == 0
"""
_ICEBERG: Final = """
import pyiceberg.table, meshsdk as mesh
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.expressions import And, AlwaysTrue, In
from pyiceberg.serializers import FromInputFile
from meshsdk.tables.open_iceberg import _expression
assert _expression([["day", "in", [1, 2]]]) == And(AlwaysTrue(), In("day", (1, 2)))
assert hasattr(pyiceberg.table.DataScan, "plan_files") and hasattr(mesh, "open_iceberg")
"""
_LANCE: Final = """
import tempfile, lance, pyarrow as pa, meshsdk as mesh
from meshsdk.tables.stored_streams import streams_of
held = lance.write_dataset(pa.table({"n": [1, 2, 3], "m": [4, 5, 6]}), tempfile.mkdtemp() + "/a.lance")
held.delete("n = 2")
(fragment,) = held.get_fragments()
assert fragment.metadata.to_json()
(stream,) = streams_of(fragment.to_batches(columns=["n"]))
assert pa.ipc.open_stream(stream).read_all().to_pydict() == {"n": [1, 3]}
assert hasattr(mesh, "open_lance")
"""
SMOKES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "": ((), "import meshsdk; from meshsdk import ops; assert ops.decode('image')"),
    "server": (("server",), _SERVE),
    "tracing": (
        ("server", "tracing"),
        "import sys; sys.argv += ['--trace-endpoint', 'http://127.0.0.1:9', '--trace-ratio', '1']\n" + _SERVE,
    ),
    "parquet": (
        ("server", "parquet"),
        "import pyarrow.parquet, meshd.datasets.tables",
    ),
    "iceberg": (("iceberg",), _ICEBERG),
    "lance": (("lance",), _LANCE),
    "audio": (("server", "audio"), "import soundfile, meshd.transform.builtin.sound_files"),
    "video": (("server", "video"), "import av, meshd.transform.builtin.video"),
    "science": (("server", "science"), "import numcodecs.blosc, meshd.transform.builtin.zarr_windows"),
    "grib": (
        ("server", "grib"),
        "import eccodes, meshd.transform.builtin.zarr_codecs as codecs\n"
        "handle = eccodes.codes_grib_new_from_samples('regular_ll_pl_grib2')\n"
        "eccodes.codes_set_values(handle, [float(number % 7) for number in range(496)])\n"
        "data = eccodes.codes_get_message(handle)\n"
        "assert len(codecs.decode_chunk([{'id': 'grib', 'dtype': 'float32'}], data, 4 * 496)) == 1984",
    ),
    "medical": (
        ("server", "medical"),
        "import nibabel, pydicom, tifffile, openjpeg, jpeg_ls, meshd.transform.builtin.nifti, "
        "meshd.transform.builtin.dicom, meshsdk.arrays.open_dicom\n"
        "import numpy, imagecodecs, meshd.transform.builtin.dicom_jpeg as dicom_jpeg\n"
        "from types import SimpleNamespace as Runner\n"
        "assert dicom_jpeg.is_available('1.2.840.10008.1.2.4.70')\n"
        "pixels = numpy.arange(3000, dtype='<u2').reshape(50, 60)\n"
        "data = imagecodecs.jpeg8_encode(pixels, lossless=True, bitspersample=12, predictor=1)\n"
        "file = Runner(rows=50, columns=60, samples_per_pixel=1, bits_allocated=16)\n"
        "assert dicom_jpeg.decode_frame(data, file) == pixels.tobytes()",
    ),
    "chat": (("server", "chat"), "import jinja2, meshd.transform.builtin.chat"),
    "operator": (("operator",), "import meshoperator.manager, meshoperator.resources"),
    "tools": (("tools",), "import meshtools.doctor, meshtools.top, meshtools.traces"),
    "fsspec": (("fsspec",), "import fsspec; assert fsspec.get_filesystem_class('mesh').protocol"),
    "zarr": (("zarr",), "import zarr, meshsdk.adapters.zarrs"),
    "grain": (("grain",), "import grain, meshsdk.adapters.grains"),
    "webdataset": (("webdataset",), "import webdataset, meshsdk.adapters.webdatasets"),
    "gpu": (("gpu",), "import pynvml, meshsdk"),
    "torch": (("torch",), "import torch, meshsdk.loader.torch_iterable"),
    "torchdata": (("torch", "torchdata"), "import torchdata, meshsdk.adapters.torchdata"),
    "lightning": (("torch", "lightning"), "import pytorch_lightning, meshsdk.adapters.lightning"),
    "huggingface": (("torch", "huggingface"), "import datasets, meshsdk.adapters.huggingface"),
}
LARGE: Final = ("torch", "torchdata", "lightning", "huggingface")


def run(*command: object, quiet: bool = True) -> None:
    """Run a program to its end. Raises CalledProcessError, which tells what it said."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, [str(word) for word in command])


def build_wheels(folder: Path) -> list[Path]:
    """Build the wheels of both distributions."""
    for project in (ROOT, ROOT / "tools"):
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, project)
    return sorted(folder.glob("*.whl"))


def try_extra(name: str, resolution: str, python: str, wheels: Path) -> None:
    """Install `shardmesh[…]` in an empty environment and run its smoke test."""
    extras, smoke = SMOKES[name]
    with tempfile.TemporaryDirectory(prefix="extras-") as scratch:
        folder = Path(scratch)
        run(python, "-m", "venv", folder / "venv")
        inside = folder / "venv" / "bin" / "python"
        wheel = next(wheels.glob("shardmesh-[0-9]*.whl"))
        wanted = f"shardmesh[{','.join(extras)}] @ file://{wheel}" if extras else wheel
        options = ("--quiet", "--python", inside, "--resolution", RESOLUTIONS[resolution])
        run(sys.executable, "-m", "uv", "pip", "install", *options, "--find-links", wheels, wanted)
        run(inside, "-m", "pip", "check")
        script = folder / "smoke.py"
        script.write_text(smoke)
        run(inside, "-W", "ignore", script)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.extras", description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(filter(None, SMOKES))}")
    parser.add_argument("--resolution", choices=tuple(RESOLUTIONS), action="append")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args(arguments)
    names = options.extras or [name for name in SMOKES if name not in LARGE]
    failed = []
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        build_wheels(Path(folder))
        for name in names:
            for resolution in options.resolution or RESOLUTIONS:
                told = f"{name or 'plain'}, {resolution}"
                try:
                    try_extra(name, resolution, options.python, Path(folder))
                except (subprocess.SubprocessError, OSError) as error:
                    failed.append(told)
                    print(f"{told}: {error}", flush=True)
                else:
                    print(f"{told}: works", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
