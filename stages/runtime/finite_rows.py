"""Whether rows that lie in host memory hold NaN or infinity, found out at the speed of reading them.

As an integer, a floating number whose exponent is all ones (NaN, infinity) is larger than any finite one of its sign.
So one maximum over the signed integers tells of the positive ones and one over the unsigned integers of the negative
ones; both are vectorised for every type, which `isfinite` of bfloat16 is not: 64 rows of 3584 take 15 us, not 600.
"""

import numpy as np
import numpy.typing as npt
import torch

_AS_INTEGERS: dict[torch.dtype, tuple[torch.dtype, npt.DTypeLike, int, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80, 0x8000),
    torch.float16: (torch.int16, np.uint16, 0x7C00, 0x8000),
    torch.float32: (torch.int32, np.uint32, 0x7F800000, 0x80000000),
}
"""The integers of the same width, infinity's bits, the sign's bit."""


def all_finite(rows: torch.Tensor) -> bool:
    """`rows`: any shape, contiguous, on the CPU, float32, bfloat16 or float16."""
    if rows.numel() == 0:
        return True
    signed_type, unsigned_type, infinity, sign = _AS_INTEGERS[rows.dtype]
    signed = rows.view(signed_type).numpy()
    return bool(signed.max() < infinity and signed.view(unsigned_type).max() < infinity | sign)
