"""Plans how many crops of one length go through the vocoder together.

A CUDA graph has a fixed number of crops. If there are fewer, it computes the rest for nothing, and a graph of
few frames takes as long as its kernel launches, however few the frames.
"""

import bisect
from functools import cache

BATCH_SIZES = (1, 2, 4, 8, 16)
"""Crops per graph, at any length."""
SHORT_BATCH_SIZES = (3, 6, 12)
"""Additional sizes for crops of at most `LAUNCH_FRAMES`, where two graphs instead of one would double the
launches. Longer crops lose nothing when 9 are computed as 8 and 1."""
LAUNCH_FRAMES = 250
"""Up to this many mel frames (crops times length), launches determine a graph's time; beyond, it is
proportional to the frames: 2.2 ms and 0.0085 ms per frame on one H200."""


def batch_sizes(length: int) -> tuple[int, ...]:
    """Graph sizes for crops of `length` mel frames, ascending."""
    return tuple(sorted(BATCH_SIZES + SHORT_BATCH_SIZES)) if length <= LAUNCH_FRAMES else BATCH_SIZES


def needed_sizes(length: int, max_num_crops: int) -> tuple[int, ...]:
    """The `batch_sizes` that `batch_plan` uses for up to `max_num_crops` crops."""
    sizes = batch_sizes(length)
    return sizes[: bisect.bisect_left(sizes, max_num_crops) + 1]


@cache
def batch_plan(num_crops: int, length: int) -> tuple[int, ...]:
    """Graph sizes, largest first, that compute `num_crops` crops of `length` mel frames in the least time; of
    equals, the fewest graphs. Only the last one can have room left."""
    sizes = batch_sizes(length)
    # By crop count: time in frames, number of graphs, their sizes.
    plans: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for count in range(1, num_crops + 1):
        options = []
        for size in sizes:
            time, graphs, others = plans[max(0, count - size)]
            options.append((time + max(LAUNCH_FRAMES, size * length), graphs + 1, (*others, size)))
        plans.append(min(options))
    return tuple(sorted(plans[num_crops][2], reverse=True))
