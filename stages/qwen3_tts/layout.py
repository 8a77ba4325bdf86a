"""The talker's input rows as integers: which text id, codec id, frame or vector each row is the sum of."""

import msgspec

NONE, VECTOR, FRAME = -1, -2, -3
"""In `PromptRows.codec`: nothing, the speaker's vector, the next frame of the reference audio. `NONE` in
`PromptRows.text`, too."""


class PromptRows(msgspec.Struct, frozen=True, array_like=True):
    text: tuple[int, ...]
    codec: tuple[int, ...]
    vector: bytes = b""  # float32 [width]
    frames: bytes = b""  # int16 [num_frames, 16]
