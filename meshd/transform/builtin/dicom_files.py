"""DICOM files: one frame after the other, as numbers that mean something.

Law: stored values are pydicom's. Slope and offset of a frame are those of that frame, wherever the file has
them. What a header claims is checked against a bound before anything is decoded.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from meshd.transform.builtin import dicom_jpeg
from meshd.transform.errors import BadSampleError, MissingLibraryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[Any]

FORMATS: Final = "a DICOM file with pixels"
MAX_FRAME_PIXELS: Final = 1 << 26
MAX_FRAMES: Final = 1 << 16
_DEFLATED: Final = b"1.2.840.10008.1.2.1.99"
_PALETTE: Final = "PALETTE COLOR"
Values = Literal["modality", "stored", "display"]


@cache
def load_library() -> Any:
    """Return the module `pydicom`. Raises MissingLibraryError."""
    try:
        import pydicom
        import pydicom.pixels
    except (ImportError, OSError) as error:
        raise MissingLibraryError("pydicom", "medical") from error
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # the bad sample reports the problem
    dicom_jpeg.install(pydicom.pixels.get_decoder)
    return pydicom


class DicomReader:
    """An open DICOM file. `frames`, `rows`, `columns`; `channels`: 1 or 3; `dtype`: of the stored values."""

    def __init__(self, data: bytes) -> None:
        """Raises BadSampleError."""
        library = load_library()
        if data[128:132] != b"DICM":
            raise BadSampleError("not a DICOM file: it does not begin with 128 bytes and DICM")
        if _DEFLATED in data[:4096]:
            raise BadSampleError("a deflated DICOM file: store it in another transfer syntax")
        with _blame_file("not a readable DICOM file"):
            self._file: Any = library.dcmread(io.BytesIO(data))
            self._describe()

    def __repr__(self) -> str:
        return f"<DicomReader {self.frames} × {self.rows} × {self.columns}>"

    def _describe(self) -> None:
        file = self._file
        if "PixelData" not in file and "FloatPixelData" not in file and "DoubleFloatPixelData" not in file:
            raise BadSampleError(
                "a DICOM file without pixels, of the modality " + str(file.get("Modality"))[:16]
            )
        self.rows, self.columns = int(file.Rows), int(file.Columns)
        self.frames = int(file.get("NumberOfFrames") or 1)
        samples = int(file.SamplesPerPixel)
        self._palette = file.PhotometricInterpretation == _PALETTE
        self.channels = 3 if self._palette else samples
        fits = 0 < self.rows * self.columns <= MAX_FRAME_PIXELS and 0 < self.frames <= MAX_FRAMES
        if not fits or self.channels not in (1, 3):
            raise BadSampleError(
                f"{self.frames} frames of {self.rows}×{self.columns}×{samples}; at most {MAX_FRAMES} "
                f"frames of {MAX_FRAME_PIXELS} pixels, of 1 or 3 values, are read"
            )
        bits = int(file.BitsAllocated)
        if "PixelData" not in file:
            self.dtype = f"float{bits}"
        else:
            sign = "int" if file.get("PixelRepresentation") and self.channels == 1 else "uint"
            self.dtype = "uint8" if bits == 1 or self._palette else f"{sign}{bits}"
        if self.channels == 3 and self.dtype != "uint8":
            raise BadSampleError(f"colours of {bits} bits; known are 8")

    def stored(self, frame: int) -> Numbers:
        """Return a frame as stored, [rows, columns, channels]; colours as RGB. Raises BadSampleError."""
        library = load_library()
        with _blame_file("its pixels cannot be decoded"):
            found = library.pixels.pixel_array(self._file, index=frame)
            if self._palette:
                found = library.pixels.apply_color_lut(found, self._file)
                found = (found >> 8).astype(np.uint8) if found.dtype != np.uint8 else found
        shape = (self.rows, self.columns, self.channels)
        native = found.dtype.newbyteorder("=")
        if native != self.dtype or found.size != np.prod(shape):
            raise BadSampleError(
                f"a frame of {native}{list(found.shape)}; the header says {self.dtype}{list(shape)}"
            )
        return np.asarray(found, native).reshape(shape)

    def modality(self, frame: int) -> Numbers:
        """Return a frame in the units of its modality, such as Hounsfield units, as float64; colours as
        stored. Raises BadSampleError."""
        stored = self.stored(frame)
        if self.channels == 3:
            return stored
        file = self._file
        if "ModalityLUTSequence" in file:
            with _blame_file("its modality LUT is damaged"):
                return np.asarray(load_library().pixels.apply_modality_lut(stored, file), np.float64)
        with _blame_file("its rescale slope or intercept cannot be read"):
            slope = self._number(frame, "PixelValueTransformationSequence", "RescaleSlope")
            offset = self._number(frame, "PixelValueTransformationSequence", "RescaleIntercept")
            if slope is None and "DoseGridScaling" in file:
                slope = float(file.DoseGridScaling)
        found = stored.astype(np.float64)
        return found if slope is None else found * slope + (offset or 0.0)

    def display(self, frame: int, window: Sequence[float] | None) -> Numbers:
        """Return a frame as uint8, as a viewer shows it: the window [center, width], by default the file's
        first, or everything from the lowest to the highest value. Raises BadSampleError."""
        values = self.modality(frame)
        if self.channels == 3:
            return values
        with _blame_file("its window cannot be read"):
            return self._apply_window(values, frame, window)

    def _apply_window(self, values: Numbers, frame: int, window: Sequence[float] | None) -> Numbers:
        function = str(self._file.get("VOILUTFunction") or "LINEAR")
        if window is None:
            center = self._number(frame, "FrameVOILUTSequence", "WindowCenter")
            width = self._number(frame, "FrameVOILUTSequence", "WindowWidth")
            if center is None or width is None:
                if "VOILUTSequence" in self._file:
                    raise BadSampleError(
                        "a VOI LUT without a window: give a window, or take the modality's values"
                    )
                low, high = float(values.min()), float(values.max())
                center, width, function = (low + high) / 2, high - low, "LINEAR_EXACT"
        else:
            (center, width), function = window, "LINEAR"
        if function == "SIGMOID":
            with np.errstate(over="ignore"):
                shown = 1 / (1 + np.exp(-4 * (values - center) / (width or 1.0)))
        else:
            if function == "LINEAR":  # PS3.3 C.11.2.1.2: from one whole number to another
                center, width = center - 0.5, width - 1
            shown = (values - center) / width + 0.5 if width > 0 else (values > center).astype(np.float64)
        if self._file.PhotometricInterpretation == "MONOCHROME1":
            shown = 1 - shown
        return np.rint(np.clip(shown, 0, 1) * 255).astype(np.uint8)

    def _number(self, frame: int, macro: str, name: str) -> float | None:
        """Return a value of the frame: from its functional groups, those that all frames share, or the file.

        Of several, the first. Raises BadSampleError.
        """
        file, places = self._file, list[Any]()
        own, shared = file.get("PerFrameFunctionalGroupsSequence"), file.get("SharedFunctionalGroupsSequence")
        if own and frame < len(own):
            places += own[frame].get(macro) or ()
        if shared:
            places += shared[0].get(macro) or ()
        found = next((place[name].value for place in (*places, file) if name in place), None)
        if found is None or found == "":
            return None
        try:
            number = float(found if isinstance(found, (str, int, float)) else found[0])
        except (TypeError, ValueError, IndexError) as error:
            raise BadSampleError(f"its {name} is not a number") from error
        if not np.isfinite(number):
            raise BadSampleError(f"its {name} is {number}")
        return number


@contextmanager
def _blame_file(what: str) -> Iterator[None]:
    """Whatever pydicom raises means a bad file: it parses elements as they are asked for, in code for many
    formats. Raises BadSampleError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (BadSampleError, MemoryError):
        raise
    except Exception as error:
        raise BadSampleError(f"{what}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "missing dependencies" in text:
        found = re.search(r"'[^']*'", text)
        syntax = found[0] if found else "their transfer syntax"
        return f'no decoder of {syntax} on this node: pip install "shardmesh[medical]" on every node'
    return text[:200]
