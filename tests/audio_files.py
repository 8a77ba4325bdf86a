"""Audio files as a player reads them, by FFmpeg's decoders."""

import io

import av
import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 24_000


def read_audio(data: bytes) -> npt.NDArray[np.int16]:
    """Samples [num_samples] at 24 kHz, mono; Opus, which is decoded at 48 kHz, is resampled."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE_HZ)
    pieces = [np.zeros(0, dtype=np.int16)]
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams
        assert isinstance(stream, av.AudioStream)
        assert stream.channels == 1
        assert stream.rate in (SAMPLE_RATE_HZ, 48_000)
        for decoded in (*container.decode(stream), None):
            pieces += [frame.to_ndarray()[0] for frame in resampler.resample(decoded)]
    return np.concatenate(pieces)
