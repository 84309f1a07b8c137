"""Archives of every kind, made by other hands: the standard library's."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import zipfile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["KINDS", "archive_of", "tar_of", "zip_of", "zstd"]
KINDS = ("tar", "tar.gz", "tgz", "tar.zst", "stored.zip", "zip", "mixed.zip")


def tar_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zip_of(files: dict[str, bytes], *methods: int) -> bytes:
    """Packed with each method in turn."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data, methods[number % len(methods)])
    return file.getvalue()


def archive_of(kind: str, files: dict[str, bytes]) -> bytes:
    """The bytes of an object that ends in `.KIND`."""
    if kind == "stored.zip":
        return zip_of(files, zipfile.ZIP_STORED)
    if kind == "zip":
        return zip_of(files, zipfile.ZIP_DEFLATED)
    if kind == "mixed.zip":
        return zip_of(files, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    tar = tar_of(files)
    if kind in ("tar.gz", "tgz"):
        return gzip.compress(tar, mtime=0)
    checked = {int(zstd.CompressionParameter.checksum_flag): 1}
    return zstd.compress(tar, options=checked) if kind == "tar.zst" else tar
