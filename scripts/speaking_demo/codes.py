"""Codec ids, which encode a sound and its place in the text.

id = 1 + sound + 256 * (index of the text token mod 8) + 2048 * (step within the token mod 4), which gives 1
to 8192.

Every unit begins with two silent codes. Their sound encodes the block of eight tokens, so that from the last
of these and the last id the talker always knows which of 128 text tokens it is speaking. Within a unit, no
(sound, step mod 4) repeats, so that the unit and the last id alone determine the next.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.espeak import Espeak
from scripts.speaking_demo.voice import Envelope, analyse, features, join, pitch_of, silence

NUM_SOUNDS = 256
TOKENS, STEPS = 8, 4
BLOCKS = 16
LONGEST = TOKENS * BLOCKS
"""Number of distinguishable tokens."""
SILENT_STEPS = 2
"""Codes at the start of a unit whose sound is the block's."""
_NUM_SILENCES = 3
"""Further silent sounds after those of the blocks: pauses longer than four codes need them."""
_FRAMES_PER_CODE = 2
_WORDS_PER_MINUTE = 220
_SENTENCE = "I am a very small robot voice, and I hear all of you."


@dataclass(frozen=True)
class Codebook:
    units: dict[str, tuple[int, ...]]
    """The sounds of each unit after its two silent codes."""
    frames: dict[str, Envelope]
    """Each unit as espeak-ng speaks it, two frames per sound."""

    def sounds(self, units: list[str]) -> torch.Tensor:
        """A text's sounds, with two silent codes at the end; int64 [num_codes]."""
        found: list[int] = []
        for index, unit in enumerate([*units, vocabulary.NO_PAUSE]):
            found += (index // TOKENS % BLOCKS,) * SILENT_STEPS + self.units[unit]
        return torch.tensor(found)

    def envelope(self, units: list[str]) -> Envelope:
        """The text as concatenated espeak-ng words, two frames per code."""
        pause = silence(SILENT_STEPS * _FRAMES_PER_CODE)
        parts = [part for unit in units for part in (pause, self.frames[unit])]
        return join([*parts, pause])


def to_ids(sounds: torch.Tensor, token: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return 1 + sounds + NUM_SOUNDS * (token % TOKENS) + NUM_SOUNDS * TOKENS * (step % STEPS)


def sounds_of(ids: torch.Tensor) -> torch.Tensor:
    return (ids - 1) % NUM_SOUNDS


def make_codebook() -> Codebook:
    """Speaks every unit with espeak-ng and clusters the audio (k-means). Raises `OSError` without
    espeak-ng."""
    # espeak-ng's output depends on what it said before, so it starts afresh in a separate process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        frames = pool.submit(_speak).result()
    loudest = float(torch.quantile(torch.cat([f.log_power for f in frames.values()])[::4], 0.999))
    heard = {unit: features(envelope, loudest) for unit, envelope in frames.items() if len(envelope)}
    silent = features(silence(_FRAMES_PER_CODE), loudest)
    num_free = NUM_SOUNDS - BLOCKS - _NUM_SILENCES
    centres = torch.cat(
        [silent.expand(_NUM_SILENCES, -1), _k_means(torch.cat(list(heard.values())), num_free)]
    )
    units = {unit: _sounds(heard[unit], centres) if unit in heard else () for unit in frames}
    return Codebook(units, frames)


def _speak() -> dict[str, Envelope]:
    torch.set_num_threads(1)
    espeak = Espeak(words_per_minute=_WORDS_PER_MINUTE)
    rate = espeak.sample_rate_hz
    pitch = pitch_of(torch.from_numpy(espeak(_SENTENCE)), rate)
    frames: dict[str, Envelope] = {}
    for unit in vocabulary.units():
        if unit in vocabulary.PAUSES:
            frames[unit] = silence((vocabulary.PAUSES[unit] - SILENT_STEPS) * _FRAMES_PER_CODE)
        else:
            frames[unit] = analyse(torch.from_numpy(espeak(vocabulary.spoken(unit))), rate, pitch)
    return frames


def _k_means(points: torch.Tensor, num_centres: int, rounds: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> torch.Tensor:
        return points[torch.randperm(len(points), generator=generator)[:count]]

    centres = drawn(num_centres).clone()
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(1)
        members = torch.bincount(nearest, minlength=num_centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(members[:, None] < 2, drawn(num_centres), sums / members.clamp(min=1)[:, None])
    return centres


def _sounds(heard: torch.Tensor, centres: torch.Tensor) -> tuple[int, ...]:
    """The nearest centre for each step that this unit has not yet used at the same step mod 4."""
    taken: set[tuple[int, int]] = set()
    found: list[int] = []
    for step, order in enumerate(
        torch.cdist(heard, centres).argsort(dim=1, stable=True).tolist(), start=SILENT_STEPS
    ):
        sound = next(sound for sound in order if (sound, step % STEPS) not in taken)
        taken.add((sound, step % STEPS))
        found.append(BLOCKS + sound)
    return tuple(found)
