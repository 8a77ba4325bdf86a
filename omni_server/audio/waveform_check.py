"""Whether a piece of a waveform can be audio made from codec tokens.

Two reductions over the samples, 5 us per second of audio; the third only where full scale is reached.
"""

import numpy as np
import numpy.typing as npt

from omni_server.protocol.corruption import Corruption

MAX_SHARE_AT_FULL_SCALE = 0.5
"""Speech that is too loud reaches full scale at its peaks only. The decoder clips: of output that is not audio,
it clips nearly all samples."""


def waveform_fault(
    samples: npt.NDArray[np.float32], *, num_samples: int, is_varied: bool
) -> Corruption | None:
    """What is wrong with `samples` `[num_samples]`; None if nothing is.

    `is_varied`: the codec tokens that they were made of are not all the same. Then not all samples can be,
    however silent they are: a vocoder's input starts from noise, and even without it each sample of a frame
    has weights of its own. So samples that are all equal, zero or not, are what a broken vocoder makes and
    never silence.
    """
    if samples.shape != (num_samples,):
        shape = "x".join(map(str, samples.shape))
        return Corruption("shape", f"{shape} samples where {num_samples} were asked for")
    if num_samples == 0:
        return None
    lowest, highest = float(samples.min()), float(samples.max())
    if not (lowest >= -1 and highest <= 1):  # so that NaN, which both reductions keep, is found as well
        return Corruption("samples", f"samples from {lowest:g} to {highest:g}; full scale is -1 to 1")
    if lowest == highest and is_varied:
        return Corruption("flat", f"all {num_samples} samples are {lowest:g}, but the codec tokens differ")
    if lowest == -1 or highest == 1:
        share = np.count_nonzero(np.abs(samples) == 1) / num_samples
        if share > MAX_SHARE_AT_FULL_SCALE:
            return Corruption("clipped", f"{share:.0%} of {num_samples} samples are at full scale")
    return None
