"""When the talker will have made how many codec tokens, learned from the utterances of late.

An utterance's codes do not come evenly. As long as the thinker writes, each waits for a token of the
thinker's; after that the talker goes on by itself, two or three times as fast. How long the text will be
nobody knows, but utterances of the same load are much alike.
"""

from itertools import accumulate

LEARNING_RATE = 0.2
"""Of a moving average; each utterance counts once for each of its blocks."""
MOST_TIMES_SLOWER = 3.0
"""A block that took longer than so many times what its like did counts as so many: a client's tool, a stop
string or a stage that was away kept it waiting, and not the next utterance's."""
MOST_RELATIVE = 4.0
"""An utterance counts as at most so many times faster or slower than others; load changes by steps."""


class TalkerPace:
    """Seconds that each block of codes took after the one before it, by its place in the utterance."""

    def __init__(self, codes_per_block: int) -> None:
        self.codes_per_block = codes_per_block
        """The talker's codes come by so many (`CodecLayout.codes_per_block`)."""
        self._block_s: list[float] = []
        self._sums_s: list[float] = []  # of the blocks before each; made anew when something has been learned

    @property
    def is_known(self) -> bool:
        """Something has been learned."""
        return bool(self._block_s)

    def learn(self, num_before: int, num_after: int, seconds: float) -> bool:
        """An utterance of `num_before` codes has got `num_after`, `seconds` later. False if they end no
        block: then nothing has been learned, and the next call is to be told of these, too."""
        first, end = num_before // self.codes_per_block, num_after // self.codes_per_block
        if first < end:
            self._sums_s.clear()
        for block in range(first, end):
            block_s = seconds / (end - first)
            if self._block_s:
                block_s = min(block_s, MOST_TIMES_SLOWER * self._block_s[min(block, len(self._block_s) - 1)])
            if block < len(self._block_s):
                self._block_s[block] += LEARNING_RATE * (block_s - self._block_s[block])
            else:  # the places before it that nobody has told of: as this one
                self._block_s += [block_s] * (block + 1 - len(self._block_s))
        return first < end

    def expected_s(self, first_code: int, num_codes: int, needed: int, elapsed_s: float) -> float:
        """Seconds until an utterance will have `needed` codes.

        It has `num_codes`, more than `first_code`, and took `elapsed_s` for those from `first_code` on: as
        much faster or slower than others were it will be in what follows.
        """
        if not self._block_s:
            return elapsed_s * (needed - num_codes) / (num_codes - first_code)
        usual_s = self._usual_s(first_code, num_codes)
        relative = elapsed_s / usual_s if usual_s else 1.0
        relative = min(max(relative, 1 / MOST_RELATIVE), MOST_RELATIVE)
        return relative * self._usual_s(num_codes, needed)

    def _usual_s(self, begin: int, end: int) -> float:
        """From one number of codes to another."""
        return self._first_s(end) - self._first_s(begin)

    def _first_s(self, num_codes: int) -> float:
        """Seconds for so many codes. Blocks that no utterance has come to are as the last one known."""
        if not self._sums_s:
            self._sums_s = list(accumulate(self._block_s, initial=0.0))
        blocks, codes = divmod(num_codes, self.codes_per_block)
        known = min(blocks, len(self._block_s) - 1)
        return self._sums_s[known] + self._block_s[known] * (blocks - known + codes / self.codes_per_block)
