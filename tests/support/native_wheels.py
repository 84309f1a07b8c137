"""A small compiled wheel, built by the C compiler of this machine: a module that needs a library that needs
another one, as in wheels that `auditwheel` has repaired."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sysconfig
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from packaging import tags

if TYPE_CHECKING:
    from collections.abc import Mapping

LIBRARY: Final = "tiny.libs/libatiny-1.so.1"  # loaded before the library that it needs is there
BASE: Final = "tiny.libs/libbase-1.so.1"
MODULE: Final = f"tiny/_core{sysconfig.get_config_var('EXT_SUFFIX')}"

_BASE = "int tiny_base(int value) { return value + 1; }"
_LIBRARY = "int tiny_base(int); int tiny_twice(int value) { return tiny_base(2 * value); }"
_MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>

int tiny_twice(int);
static int file = -2, reason = 0;

__attribute__((constructor)) static void first(void) {
    file = open("/etc/passwd", O_RDONLY);
    reason = errno;
}

static PyObject *twice(PyObject *self, PyObject *value) {
    return PyLong_FromLong(tiny_twice((int)PyLong_AsLong(value)));
}

static PyObject *constructed(PyObject *self, PyObject *none) {
    return Py_BuildValue("ii", file, reason);
}

static PyMethodDef methods[] = {
    {"twice", twice, METH_O, NULL}, {"constructed", constructed, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, 0, methods};
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
"""


def build_files(folder: Path) -> dict[str, bytes]:
    """Return the files of the wheel, without its metadata. Skips the test without a compiler."""
    headers = sysconfig.get_path("include")
    if shutil.which("cc") is None or not (Path(headers) / "Python.h").exists():
        pytest.skip("needs a C compiler and the headers of Python")

    def compile_c(name: str, code: str, *more: str) -> bytes:
        made, source = folder / Path(name).name, folder / f"{Path(name).name}.c"
        source.write_text(code)
        options = ["-shared", "-fPIC", "-o", str(made), str(source), *more]
        subprocess.run(["cc", *options], check=True, timeout=120)
        return made.read_bytes()

    base = compile_c(BASE, _BASE, "-Wl,-soname,libbase-1.so.1")
    library = compile_c(LIBRARY, _LIBRARY, "-Wl,-soname,libatiny-1.so.1", str(folder / Path(BASE).name))
    needed = [f"-I{headers}", str(folder / Path(LIBRARY).name), f"-Wl,-rpath-link,{folder}"]
    module = compile_c(MODULE, _MODULE, *needed)
    init = b"from ._core import constructed, twice\n"
    return {"tiny/__init__.py": init, MODULE: module, LIBRARY: library, BASE: base}


def wheel_name(version: str = "1.0") -> str:
    """Return the name of the wheel, for this machine and Python."""
    return f"tiny-{version}-{next(iter(tags.sys_tags()))}.whl"


def join_wheel(files: Mapping[str, bytes], recorded: Mapping[str, bytes] | None = None) -> bytes:
    """Return the wheel. `recorded`: contents whose hashes RECORD has, if others than those of the files."""
    info, out = "tiny-1.0.dist-info", io.BytesIO()
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for name, data in (files if recorded is None else recorded).items()
    ]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return out.getvalue()
