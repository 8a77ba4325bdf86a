"""What a process that decodes a stranger's file says of it: FFmpeg's faults may make it say anything."""

import random
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from omni_server.errors import InvalidRequestError, OmniError
from omni_server.media import audio, video
from omni_server.media.limited_process import end_programs
from omni_server.media.limits import MediaLimits
from tests.fuzz.target import Run, Target

_LIMITS = MediaLimits(
    max_audio_seconds=5, max_video_pixels=1_000_000, max_video_frame_pixels=100_000, decode_timeout_s=2
)
_NUMBERS = (0, 1, 2, 8, 9, 3_999, 16_000, 192_000, 2**31 - 1, 2**31, 2**32 - 1)

_READER = """
def read(file, output, arguments):
    output.write(bytes.fromhex({header!r}))
    output.write(bytes.fromhex({rest!r}) * {times})
    output.flush()
    {deed}
    return {status}
"""
_DEEDS = (
    "pass",
    "pass",
    "import os; os._exit({status})",
    "import os; os.kill(os.getpid(), 11)",
    "raise ValueError('x' * 100_000)",
    "1 / 0",
)


@asynccontextmanager
async def _open() -> AsyncIterator[Run]:
    """Puts a program of its own in the place of FFmpeg's."""
    modules = (audio, video)
    saved = [module._MODULE for module in modules]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "reader.py"
        for module in modules:
            module._MODULE = program

        async def run(rng: random.Random) -> str:
            end_programs()  # they keep the module that they have loaded
            header = b"".join(
                rng.choice(_NUMBERS).to_bytes(4, "little") for _ in range(rng.choice((0, 1, 3, 4, 4, 5)))
            )
            if rng.random() < 0.3:
                header = struct.pack("=IIQ", 16_000, 1, 0)
            rest = bytes(64) if rng.random() < 0.3 else rng.randbytes(rng.choice((0, 3, 4, 64)))
            status = rng.choice((0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 255))
            deed = rng.choice(_DEEDS).format(status=status)
            program.write_text(
                _READER.format(
                    header=header.hex(),
                    rest=rest.hex(),
                    times=rng.choice((1, 1_000, 100_000)),
                    deed=deed,
                    status=status,
                )
            )
            try:
                if rng.random() < 0.5:
                    samples = audio.decode_audio(b"\0\0\0\x18ftypmp42", _LIMITS).samples
                    assert len(samples) <= _LIMITS.max_audio_seconds * 16_000
                    assert np.abs(samples).max(initial=0) <= 1
                else:
                    frames = video.decode_video(b"\0\0\0\x18ftypmp42" + bytes(20), _LIMITS).frames
                    assert 0 < frames[..., 0].size <= _LIMITS.max_video_pixels
            except InvalidRequestError:
                return "refused"
            except OmniError:  # the program itself failed: 500, and the log says how
                return "failed"
            return "taken"

        try:
            yield run
        finally:
            for module, path in zip(modules, saved, strict=True):
                module._MODULE = path


CHILD_OUTPUT = Target(
    "child output", "programs that write at random", _open, frozenset({"refused", "failed"}), rounds=25
)
