"""How long code2wav takes for how many codec tokens, learned from the windows that come back."""

import math
from collections import deque
from collections.abc import Callable

NUM_STEPS = 32
"""Steps that are looked at: at 16 or more callers those of a few seconds."""
SAME_STEP_S = 0.004
"""Windows that come back within this time were computed in one step; the shortest step takes several times as long."""


class StepTimes:
    """Seconds of a step as a line over its codes: what any step takes, and what each code adds.

    The line is fitted to recent steps, by least squares. So it knows what else the device does meanwhile.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)  # codes, seconds
        self._last_end = clock()
        # The step whose windows are coming back.
        self._end = clock()
        self._codes = 0
        self._sent_at = 0.0
        self._per_step_s = 0.0
        self._per_code_s = 0.0

    @property
    def largest_step(self) -> int:
        """Codes of the largest recent step."""
        return max((codes for codes, _ in self._steps), default=self._codes)

    @property
    def usual_step_s(self) -> float:
        """Seconds of the step that runs at any moment, on average: the longer one is, the likelier it is that one."""
        total = sum(seconds for _, seconds in self._steps)
        return sum(seconds * seconds for _, seconds in self._steps) / total if total else 0.0

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
        """Seconds until `num_codes` have been computed, in as many steps as they need. 0 if nothing is known."""
        if not num_codes:
            return 0.0
        num_steps = max(1.0, num_codes / max(1, self.largest_step))
        return num_steps * self._per_step_s + num_codes * self._per_code_s

    def predict_among_others(self, num_before: int, num_codes: int, chance: float) -> float:
        """Seconds for a window of `num_codes`, and `num_before` of others before it, from the beginning of a step on,
        where still others fill the step up, for sure with a `chance` of 1. What does not fit waits for whole steps."""
        together, largest = num_before + num_codes, self.largest_step
        if num_before and together > largest:
            return math.ceil(together / max(1, largest)) * self.predict(largest)
        return max(self.predict(together), chance * self.usual_step_s)

    def rest_of_step_s(self, num_codes: int, waited_s: float, longest_wait_s: float) -> float | None:
        """Seconds until the running step ends, if a window that has waited for `waited_s` is in it; None if it may not
        be. `num_codes` are those of all windows that are there, of which one has waited for `longest_wait_s`.

        It is in the step if it was there when that began and all fit into one: so many streams whose codes come at the
        same time do not wait for each other."""
        since_last_s = self._clock() - self._end
        if longest_wait_s <= since_last_s:  # a step that begins with an arrival waits a moment for others
            running_for_s, least_wait_s = longest_wait_s, longest_wait_s - SAME_STEP_S
        else:  # one behind a step does not, and the one before may have ended a while before it was known here
            running_for_s, least_wait_s = since_last_s, since_last_s + SAME_STEP_S
        if num_codes > self.largest_step or waited_s < least_wait_s:
            return None
        return max(0.0, self.predict(num_codes) - running_for_s)

    def predict_more(self, num_codes: int) -> float:
        """Seconds by which a step becomes longer with `num_codes` in it."""
        return num_codes * self._per_code_s

    def _close(self) -> None:
        if not self._codes:
            return
        self._steps.append((self._codes, self._end - max(self._last_end, self._sent_at)))
        self._last_end = self._end
        count = len(self._steps)
        mean_codes = sum(codes for codes, _ in self._steps) / count
        mean_s = sum(seconds for _, seconds in self._steps) / count
        variance = sum((codes - mean_codes) ** 2 for codes, _ in self._steps)
        slope = 0.0  # if all are alike: nothing is known about larger ones
        if variance:
            slope = sum((codes - mean_codes) * (seconds - mean_s) for codes, seconds in self._steps) / variance
        self._per_code_s = min(max(slope, 0.0), mean_s / mean_codes)  # no step takes less than no time
        self._per_step_s = mean_s - self._per_code_s * mean_codes
