"""Removes from an image's file system what a daemon or an operator never loads.

`slim.py packages PREFIX` slims the wheels of an environment, `slim.py python` the interpreter that runs it,
`slim.py system` the Debian system. Runs in the build of an image, as root; it destroys any other system.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Debian packages that stay: libraries that Python or a wheel links to, certificates, time zones, a shell, and
# coreutils, whose `install` gives a daemon its directories (the init container `directory-owner`).
KEPT = (
    "base-files base-passwd netbase tzdata ca-certificates openssl",
    "libc6 libgcc-s1 gcc-12-base gcc-14-base libstdc++6 libssl3 libssl3t64 libcrypt1",
    "zlib1g liblzma5 libbz2-1.0 libexpat1 libffi8 libsqlite3-0 libuuid1",
    "dash coreutils libacl1 libattr1 libgmp10 libselinux1 libpcre2-8-0",
)
# Parts of the standard library for people who write programs, and modules of C whose libraries do not stay.
UNUSED_MODULES = (
    "ensurepip idlelib lib2to3 pydoc_data test tkinter turtle.py turtledemo config-*",
    "lib-dynload/*test* lib-dynload/_xx* lib-dynload/xx* lib-dynload/_tkinter.* lib-dynload/_curses*",
    "lib-dynload/readline.* lib-dynload/nis.* lib-dynload/_dbm.* lib-dynload/_gdbm.* lib-dynload/ossaudio*",
)
# Beside it, in the interpreter's prefix.
UNUSED_PROGRAMS = "include share lib/pkgconfig bin/pip* bin/idle* bin/2to3* bin/pydoc* bin/python*-config"
# In a wheel: its own tests, and what is for compiling against it.
UNUSED_FILES = "**/tests **/*.pyi **/*.pxd **/*.pyx **/*.a **/*.h **/include numpy/f2py"
# Not a package's own: caches, logs, conversions of character sets, which Python does itself.
LEFTOVERS = (
    "/usr/lib/*/gconv /usr/share/man /usr/share/locale /usr/share/info /usr/share/lintian /usr/share/perl*",
    "/var/cache/* /var/log/* /var/lib/apt /var/lib/dpkg/info /var/lib/dpkg/*-old /root/.cache /root/.profile",
    "/etc/apt /etc/alternatives /etc/cron* /etc/init.d /etc/rc*.d /etc/pam.d /etc/*- /tmp/*",
)


def remove(*patterns: str, below: Path = Path("/")) -> None:
    """Remove the files and directories that the glob patterns (separated by spaces) match."""
    for pattern in " ".join(patterns).split():
        for path in sorted(below.glob(pattern.removeprefix("/"))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or path.exists():
                path.unlink()


def strip(below: Path) -> None:
    """Remove the debugging symbols of every shared library."""
    for path in below.rglob("*.so*"):
        if path.is_file() and not path.is_symlink():
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)


def slim_packages(prefix: Path) -> None:
    """Slim the installed wheels of the virtual environment `prefix`."""
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    remove(UNUSED_FILES, below=packages)
    strip(packages)


def slim_python() -> None:
    """Slim the standard library and remove pip; the interpreter that runs this is the one."""
    library = Path(sysconfig.get_path("stdlib"))
    remove(*UNUSED_MODULES, "site-packages/*", "**/__pycache__", below=library)
    remove(UNUSED_PROGRAMS, below=Path(sys.base_prefix))
    strip(library.parent)


def slim_system() -> None:
    """Remove every Debian package but KEPT, without running its scripts; the database knows the rest."""
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${binary:Package}\n"],
        check=True,
        capture_output=True,
        text=True,
    )
    installed = dict(line.split() for line in listed.stdout.splitlines())
    for suffix in ("prerm", "postrm"):
        remove(f"/var/lib/dpkg/info/*.{suffix}")
    kept = set(" ".join(KEPT).split())
    leaving = [full for name, full in installed.items() if name not in kept]
    subprocess.run(
        ["dpkg", "--purge", "--force-all", "--no-triggers", *leaving],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    remove(*LEFTOVERS)


def main() -> None:
    """Do what the first argument says; `packages` takes the environment's folder."""
    match sys.argv[1:]:
        case ["packages", prefix]:
            slim_packages(Path(prefix))
        case ["python"]:
            slim_python()
        case ["system"]:
            slim_system()
        case _:
            sys.exit("slim.py packages PREFIX | python | system")


if __name__ == "__main__":
    main()
