"""Metadata that code2wav receives with a window of codec frames. The frames themselves are the prompt: the
codes of the first frame, one per codebook, then those of the second, and so on."""

import numpy as np
import numpy.typing as npt

from omni_server.family.codec import Frame
from stages.qwen_omni.encoded_window import EncodedWindow

_CODE = np.dtype("<i2")


class CodecWindow(EncodedWindow, frozen=True):
    """One request to code2wav: the result is the audio of the window's frames. There is no context in a
    window, because code2wav keeps all of it as the stream's state."""

    stream: str
    """Name of the speech stream, unique over the server's lifetime. Its windows are sent in order, each after
    the previous one has been computed."""
    first_frame: int
    """Absolute index of the window's first frame in the stream."""
    is_last: bool
    """The speech ends with this window, so its state is not needed any more."""
    past: bytes
    """Codes of the frames before `first_frame`, in the order of the prompt, little-endian int16: all frames,
    or the last `Code2WavLayout.context_frames`. They are used only if the state is missing: the stream
    begins after them, other streams needed its memory, or the computation of the previous window failed.

    They are in every window, although few need them: otherwise code2wav would have to report the missing
    state, and the server to send the window again. 578 frames of 16 codes, as many as the published
    checkpoint needs, have 18 kB, as much as 2.4 frames of audio on the way back."""
    is_first: bool = False
    """The stream begins with this window. If it has a past, others may begin with the same one."""

    def validate(self, num_tokens: int, *, num_codebooks: int, context_frames: int) -> None:
        """Check the metadata against a prompt of `num_tokens`. Raises `ValueError`, which names the wrong
        number."""
        if num_tokens == 0 or num_tokens % num_codebooks:
            raise ValueError(
                f"the window holds {num_tokens} codec tokens; it must be a positive multiple of "
                f"{num_codebooks}, the codes of a frame"
            )
        num_bytes = min(self.first_frame, context_frames) * num_codebooks * _CODE.itemsize
        if len(self.past) != num_bytes:
            raise ValueError(
                f"past has {len(self.past)} bytes; before frame {self.first_frame} there must be {num_bytes}"
            )

    def past_codes(self) -> npt.NDArray[np.int64]:
        """The codes in `past`, [number of frames * codebooks]."""
        return np.frombuffer(self.past, _CODE).astype(np.int64)


def encode_frame(frame: Frame) -> bytes:
    """Returns a frame as in `CodecWindow.past`. Raises `OverflowError` for a code beyond 16 bits."""
    return np.array(frame, _CODE).tobytes()
