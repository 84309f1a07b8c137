"""Replaces the libraries bundled with OpenCV's wheel by stubs: `stub_libraries.py SITE_PACKAGES`.

FFmpeg, OpenBLAS and codecs of images are 80 MB, which OpenCV's module links to and which the image ops never
call. A stub defines the symbols that the module needs to be loaded; a call prints the name and aborts. The
module itself, and so every pixel, is that of the wheel. Needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SOURCE = """
extern int dprintf(int, const char *, ...);
extern void abort(void) __attribute__((noreturn));
static void missing(const char *name)
{
    dprintf(2, "%s: not in this image (docker/stub_libraries.py)\\n", name);
    abort();
}
"""


def symbols(path: Path, *options: str) -> dict[tuple[str, str], str]:
    """Return the type of each dynamic symbol, by (name, version); the version is empty if it has none."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--with-symbol-versions", *options, str(path)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = {}
    for line in listed.stdout.splitlines():
        kind, name = line.split()[-2:]
        plain, _, version = re.sub("@+", "@", name).partition("@")
        found[plain, version] = kind
    return found


def write_stub(target: Path, needed: list[tuple[str, str]]) -> None:
    """Write a library of `target`'s name that defines these functions alone."""
    functions, versions = [SOURCE], defaultdict[str, list[str]](list)
    for name, version in needed:
        functions.append(f'void {name}(void) {{ missing("{name}"); }}')
        versions[version].append(name)
    script = "".join(
        f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version
    )
    with tempfile.TemporaryDirectory() as place:
        source, map_file = Path(place, "stub.c"), Path(place, "stub.map")
        source.write_text("\n".join(functions))
        map_file.write_text(script)
        options = [f"-Wl,--version-script={map_file}"] if script else []
        command = ["gcc", "-shared", "-fPIC", "-Os", "-s", "-nostdlib", "-fno-builtin", "-w", *options]
        target.unlink()
        subprocess.run([*command, f"-Wl,-soname,{target.name}", "-o", str(target), str(source)], check=True)


def replace(packages: Path) -> None:
    """Replace or remove every library in opencv_python_headless.libs. Raises ValueError for a variable."""
    (module,) = packages.glob("cv2/cv2*.so")
    undefined = symbols(module, "--undefined-only")
    for library in sorted(packages.glob("opencv_python_headless.libs/*.so*")):
        defined = symbols(library, "--defined-only")
        needed = sorted(set(defined) & set(undefined))
        if variables := [name for name, version in needed if defined[name, version] not in "TWi"]:
            raise ValueError(f"{library.name} has variables that OpenCV reads: {variables}")
        if needed:
            write_stub(library, needed)
        else:
            library.unlink()
        print(f"{library.name}: {len(needed)} functions")


if __name__ == "__main__":
    replace(Path(sys.argv[1]))
