"""Checks whether a piece of a waveform can be audio made from codec tokens.

Takes two reductions over the samples, 5 us per second of audio; a third only if full scale is reached.
"""

import numpy as np
import numpy.typing as npt

from omni_server.protocol.corruption import Corruption

MAX_SHARE_AT_FULL_SCALE = 0.5
"""Speech that is too loud reaches full scale only at its peaks. The decoder clips nearly all samples of
output that is not audio."""


def waveform_fault(
    samples: npt.NDArray[np.float32], *, num_samples: int, is_varied: bool
) -> Corruption | None:
    """Returns what is wrong with `samples` [num_samples], or None.

    `is_varied`: the codec tokens they were made from are not all the same. Then the samples cannot all be
    equal, even in silence: a vocoder's input starts from noise, and even without it each sample of a frame
    has its own weights. So samples that are all equal, zero or not, come from a broken vocoder and are never
    silence.
    """
    if samples.shape != (num_samples,):
        shape = "x".join(map(str, samples.shape))
        return Corruption("shape", f"{shape} samples where {num_samples} were asked for")
    if num_samples == 0:
        return None
    lowest, highest = float(samples.min()), float(samples.max())
    if not (lowest >= -1 and highest <= 1):  # also catches NaN, which both reductions keep
        return Corruption("samples", f"samples from {lowest:g} to {highest:g}; full scale is -1 to 1")
    if lowest == highest and is_varied:
        return Corruption("flat", f"all {num_samples} samples are {lowest:g}, but the codec tokens differ")
    if lowest == -1 or highest == 1:
        share = np.count_nonzero(np.abs(samples) == 1) / num_samples
        if share > MAX_SHARE_AT_FULL_SCALE:
            return Corruption("clipped", f"{share:.0%} of {num_samples} samples are at full scale")
    return None
