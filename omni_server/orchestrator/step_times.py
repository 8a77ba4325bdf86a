"""How long code2wav takes for how many codec tokens, learned from the windows that come back."""

from collections import deque
from collections.abc import Callable

NUM_STEPS = 32
"""Steps that are looked at: at 16 or more callers those of a few seconds."""
SAME_STEP_S = 0.004
"""Windows that come back within this time were computed in one step; the shortest step takes several times as
long."""


class StepTimes:
    """Seconds of a step as a line over its codes: what any step takes, and what each code adds.

    The line is fitted to recent steps, by least squares. So it knows what else the device does meanwhile.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)  # codes, seconds
        self._end_before = clock()
        # The step whose windows are coming back.
        self._end = clock()
        self._codes = 0
        self._sent_at = 0.0
        self._per_step_s = 0.0
        self._per_code_s = 0.0

    @property
    def last_end(self) -> float:
        """When the step ended whose windows came back last: with the first of them."""
        return self._end

    def came_back(self, num_codes: int, sent_at: float) -> None:
        """A window that had been sent at `sent_at` has been computed: `num_codes`, its context included."""
        now = self._clock()
        if self._codes and now - self._end < SAME_STEP_S:
            self._codes += num_codes
            self._sent_at = min(self._sent_at, sent_at)
        else:
            self._close()
            self._end, self._codes, self._sent_at = now, num_codes, sent_at

    def predict(self, num_codes: int) -> float:
        """Seconds of a step of `num_codes`. 0 if nothing is known, or nothing is to be computed."""
        return self._per_step_s + num_codes * self._per_code_s if num_codes else 0.0

    def _close(self) -> None:
        if not self._codes:
            return
        self._steps.append((self._codes, self._end - max(self._end_before, self._sent_at)))
        self._end_before = self._end
        count = len(self._steps)
        mean_codes = sum(codes for codes, _ in self._steps) / count
        mean_s = sum(seconds for _, seconds in self._steps) / count
        variance = sum((codes - mean_codes) ** 2 for codes, _ in self._steps)
        slope = 0.0  # if all are alike: nothing is known about larger ones
        if variance:
            slope = (
                sum((codes - mean_codes) * (seconds - mean_s) for codes, seconds in self._steps) / variance
            )
        self._per_code_s = min(max(slope, 0.0), mean_s / mean_codes)  # no step takes less than no time
        self._per_step_s = mean_s - self._per_code_s * mean_codes
