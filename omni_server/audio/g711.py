"""G.711, the telephone network's 8 bits per sample at 8 kHz, in both laws. The tables are libsndfile's."""

import io
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import soundfile

Law = Literal["ULAW", "ALAW"]

G711_RATE_HZ = 8_000


def decode_g711(data: bytes, law: Law) -> npt.NDArray[np.int16]:
    """Samples [len(data)]."""
    samples: npt.NDArray[np.int16] = _decoded(law)[np.frombuffer(data, dtype=np.uint8)]
    return samples


def encode_g711(samples: npt.NDArray[np.int16], law: Law) -> bytes:
    """One byte for each of the samples [num_samples]."""
    return _encoded(law)[samples.astype(np.int32) + 32768].tobytes()


@cache
def _decoded(law: Law) -> npt.NDArray[np.int16]:
    """By code, [256]."""
    samples, _ = soundfile.read(
        io.BytesIO(bytes(range(256))),
        dtype="int16",
        format="RAW",
        subtype=law,
        samplerate=G711_RATE_HZ,
        channels=1,
    )
    table: npt.NDArray[np.int16] = samples
    return table


@cache
def _encoded(law: Law) -> npt.NDArray[np.uint8]:
    """By sample + 32768, [65536]."""
    file = io.BytesIO()
    every_sample = np.arange(-32768, 32768).astype(np.int16)
    soundfile.write(file, every_sample, G711_RATE_HZ, format="RAW", subtype=law)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)
