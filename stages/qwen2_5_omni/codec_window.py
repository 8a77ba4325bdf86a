"""Metadata that code2wav receives with a window of codec tokens; the tokens themselves are the prompt.

All positions are absolute codec token indices in the speech stream, so each window continues the noise and
the block grid of the previous one.
"""

from stages.qwen_omni.encoded_window import EncodedWindow


class CodecWindow(EncodedWindow, frozen=True):
    """One request to code2wav: the window starts at code `first_code`, and the result is the audio of codes
    `emit_start` (included) to `emit_end` (excluded); the rest of the window is context."""

    voice: str
    noise_seed: int
    """Noise seed of the speech stream, 0 to 2**64 - 1; the same in all of its windows."""
    first_code: int
    emit_start: int
    emit_end: int
    vocoder_margin_frames: int
    """Mel frames of vocoder context on each side of the emitted span."""
    is_last: bool
    """The speech ends with this window: silence follows, not unknown audio."""
    stream: str | None = None
    """Name of the speech stream, unique over the server's lifetime, if code2wav may carry state from one
    window to the next. Windows are then sent in order, each after the previous one has been computed. If the
    previous window's state is missing, a window is computed from the codes before `emit_start`, as without a
    stream."""

    def validate(self, num_codes: int, *, codes_per_block: int, frames_per_code: int) -> None:
        """Check the span against a window of `num_codes` tokens.

        `codes_per_block` is the width of the DiT's attention block: a window that starts inside a block would
        shift the block grid and change every frame. Raises `ValueError`, which names the wrong number.
        """
        if num_codes < 1:
            raise ValueError("the window holds no codec tokens")
        if self.first_code % codes_per_block:
            raise ValueError(f"first_code is {self.first_code}; it must be a multiple of {codes_per_block}")
        end = self.first_code + num_codes
        if not self.first_code <= self.emit_start < self.emit_end <= end:
            raise ValueError(
                f"emit_start {self.emit_start} to emit_end {self.emit_end} is empty or outside the window "
                f"{self.first_code} to {end}"
            )
        if self.is_last and self.emit_end != end:
            raise ValueError(f"the last window must be emitted to its end {end}, not to {self.emit_end}")
        for place, num_codes, is_end in (
            ("before emit_start", self.emit_start - self.first_code, self.first_code == 0),
            ("after emit_end", end - self.emit_end, self.is_last),
        ):
            frames, margin = num_codes * frames_per_code, self.vocoder_margin_frames
            if frames < margin and not is_end:
                raise ValueError(f"{frames} mel frames {place}; the vocoder needs {margin}")
        if self.stream is None:
            return
        # Windows carry state in whole blocks only.
        if self.emit_start % codes_per_block:
            raise ValueError(
                f"emit_start is {self.emit_start}; in a stream it must be a multiple of {codes_per_block}"
            )
        if not self.is_last and self.emit_end % codes_per_block:
            raise ValueError(
                f"emit_end is {self.emit_end}; in a stream it must be a multiple of {codes_per_block}, "
                "except in the last window"
            )
