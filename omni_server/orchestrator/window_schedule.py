"""The windows that an utterance will be cut into: what each costs, what it needs, and where it lies in the
sound."""

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.family import CodecLayout


class WindowSchedule:
    """Windows by number, counted from 0, as `stages.codec_chunking` cuts them from an utterance that goes on
    and on."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, new_blocks: tuple[int, ...]) -> None:
        """In mode `whole` there are no windows before the end, and so no schedule."""
        self.new_blocks = new_blocks
        """The plan's, or those of one of its busy times."""
        self._plan = plan
        self._codes_per_block = layout.frames_per_block
        self._code_s = layout.samples_per_frame / layout.sample_rate_hz
        self._starts = [0]  # in blocks, of every window looked at so far and the one behind

    def start_s(self, number: int) -> float:
        """Where the window's sound begins, in seconds of the utterance."""
        return self.first_code(number) * self._code_s

    def first_code(self, number: int) -> int:
        """The code with which the window's sound begins."""
        return self._start(number) * self._codes_per_block

    def needed_codes(self, number: int) -> int:
        """Codes that the talker must have made."""
        return (self._start(number + 1) + self._plan.future_blocks) * self._codes_per_block

    def sent_codes(self, number: int) -> int:
        """Codes that code2wav gets, its context included: a step has room for so many."""
        past = min(self._plan.past_blocks, self._start(number))
        new = self._start(number + 1) - self._start(number)
        return (past + new + self._plan.future_blocks) * self._codes_per_block

    def computed_codes(self, number: int) -> int:
        """Codes of those that code2wav computes: not those before whose state it carries."""
        carried = min(self._plan.past_blocks, self._start(number)) if self._plan.carries_state else 0
        return self.sent_codes(number) - carried * self._codes_per_block

    def _start(self, number: int) -> int:
        ramp = self.new_blocks
        while len(self._starts) <= number:
            self._starts.append(self._starts[-1] + ramp[min(len(self._starts) - 1, len(ramp) - 1)])
        return self._starts[number]
