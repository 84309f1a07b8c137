"""Built-in ops, one subject per module; each op registers itself on import.

Law: only this package uses codecs. For any input bytes an op returns the complete, correct value or
raises BadSampleError: never part of an image, never more memory than its documented bound.
"""

from __future__ import annotations

import importlib

SUBJECTS = (
    "annotations",
    "array_files",
    "array_ops",
    "augmentation",
    "chat",
    "decode",
    "dicom",
    "encode",
    "geometry",
    "labels",
    "mixup",
    "nifti",
    "resize",
    "right_angles",
    "slides",
    "sound",
    "spectra",
    "text",
    "token_sequences",
    "video",
    "zarr_rows",
    "zarr_windows",
)


def load() -> None:
    """Register every built-in op. Idempotent."""
    for subject in SUBJECTS:
        importlib.import_module(f"{__name__}.{subject}")
