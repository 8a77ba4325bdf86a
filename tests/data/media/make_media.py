"""Makes the speech clips, pictures and the video of this folder. Needs espeak-ng and sox on the PATH.

Speech is synthetic and pictures are drawn, so that all of it may be redistributed with the project.
"""

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image, ImageDraw

SPEECH_RATE_HZ = 16_000
VIDEO_FPS = 8
VIDEO_FRAMES = 24
VIDEO_SIZE = (112, 84)  # width, height


@dataclass(frozen=True)
class Clip:
    name: str
    voice: str  # espeak-ng's name, "+" and a variant
    words_per_minute: int
    text: str


CLIPS = (
    Clip("speech_hello", "en-us", 150, "Hello, how are you today?"),
    Clip("speech_weather", "en-gb+f3", 160, "What is the weather like in Paris?"),
    Clip("speech_count", "en-us", 140, "Please count to ten."),
)


def write_speech(clip: Clip, folder: Path) -> None:
    """16 kHz mono 16-bit WAV. `-R -D` keep sox's result the same every time: no random numbers, no dither."""
    with tempfile.TemporaryDirectory() as scratch:
        spoken = Path(scratch) / "spoken.wav"
        subprocess.run(
            ["espeak-ng", "-v", clip.voice, "-s", str(clip.words_per_minute), "-w", str(spoken), clip.text],
            check=True,
        )
        target = folder / f"{clip.name}.wav"
        resample = ["rate", "-v", str(SPEECH_RATE_HZ)]
        subprocess.run(
            ["sox", "-R", "-D", str(spoken), "-b", "16", "-c", "1", str(target), *resample], check=True
        )


def write_mp3(source: Path, target: Path) -> None:
    samples, rate = soundfile.read(source, dtype="int16")
    soundfile.write(
        target,
        samples,
        rate,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="CONSTANT",
        compression_level=0.5,
    )


def draw_shapes() -> Image.Image:
    """A red disc, a blue square and a green triangle on a pale ground, 140 x 112."""
    image = Image.new("RGB", (140, 112), (244, 240, 224))
    pen = ImageDraw.Draw(image)
    pen.ellipse((10, 36, 50, 76), fill=(208, 32, 32))
    pen.rectangle((58, 38, 94, 74), fill=(32, 64, 200))
    pen.polygon([(118, 36), (100, 76), (134, 76)], fill=(24, 144, 56))
    return image


def draw_gradient() -> Image.Image:
    """Red grows to the right, green downwards, blue along both, 84 x 84."""
    ramp = np.linspace(0, 255, 84).astype(np.uint8)
    red, green = np.meshgrid(ramp, ramp)
    blue = ((red.astype(np.uint16) + green) // 2).astype(np.uint8)
    return Image.fromarray(np.stack([red, green, 255 - blue], axis=2))


def draw_frame(index: int) -> npt.NDArray[np.uint8]:
    """BGR [height, width, 3]: a yellow ball moves to the right over a dark ground that brightens."""
    width, height = VIDEO_SIZE
    frame = np.full((height, width, 3), (64 + 4 * index, 32 + 2 * index, 24), dtype=np.uint8)
    cv2.circle(frame, (14 + 84 * index // (VIDEO_FRAMES - 1), height // 2), 12, (32, 216, 240), -1)
    return frame


def write_video(target: Path) -> None:
    """MPEG-4 part 2 in MP4, without sound."""
    writer = cv2.VideoWriter(str(target), cv2.VideoWriter.fourcc(*"mp4v"), VIDEO_FPS, VIDEO_SIZE)
    if not writer.isOpened():
        raise RuntimeError("OpenCV has no mp4v encoder here")
    for index in range(VIDEO_FRAMES):
        writer.write(draw_frame(index))
    writer.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).parent, help="default: beside the script"
    )
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for clip in CLIPS:
        write_speech(clip, folder)
    write_mp3(folder / "speech_hello.wav", folder / "speech_hello.mp3")
    draw_shapes().save(folder / "shapes.png", optimize=True)
    draw_gradient().save(folder / "gradient.png", optimize=True)
    write_video(folder / "ball.mp4")


if __name__ == "__main__":
    main()
