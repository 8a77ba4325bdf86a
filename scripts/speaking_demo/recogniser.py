"""Finds the demo's words in a waveform and distinguishes readings, by dynamic time warping against the
voice's own words.

It processes each frame for all templates together, so that NumPy is fast enough: a path holds a template's
frame, moves to the next or skips one.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torchaudio.functional import create_dct  # type: ignore[import-untyped]

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.codes import SILENT_STEPS, Codebook
from scripts.speaking_demo.espeak import Espeak
from scripts.speaking_demo.voice import HOP, NUM_MELS, Speaker, join, mel_of, render, silence

Floats = npt.NDArray[np.float32]

_NUM_CEPSTRA = 24
_LOUDNESS_WEIGHT = 0.3
"""A whole utterance may be louder or softer than the words were."""
_DETOUR = 0.3
"""Cost of a held or skipped frame: codes fix how long a sound lasts."""
_ENTRY = 4.0
"""Cost of each word; without it, an unclear word would match two short ones."""
_FAR = np.float32(1e9)
_NUM_PADS = 2
"""Unreachable frames before each template: one more than a step can skip."""
_FRAMES_AT_ONCE = 200
_SILENT_FRAMES = 2 * SILENT_STEPS
_SEED = 99
"""Noise seed of the templates; judged audio has another."""

_UTF8, _ASCII_PHONEMES = 1, 0  # of espeak_TextToPhonemes


def hear(wave: torch.Tensor | Floats) -> Floats:
    """Returns the cepstra to compare, one row per mel frame: [num_frames, _NUM_CEPSTRA]."""
    samples = torch.as_tensor(wave, dtype=torch.float32)
    mel = mel_of(torch.nn.functional.pad(samples, (0, max(0, HOP - len(samples)))))
    cepstra = mel @ create_dct(_NUM_CEPSTRA, NUM_MELS, "ortho")
    cepstra[:, 0] *= _LOUDNESS_WEIGHT
    return cepstra.numpy()


class _Templates:
    """Concatenated rows of frames, separated by unreachable frames."""

    def __init__(self, rows: Sequence[Floats]) -> None:
        pad = np.zeros((_NUM_PADS, rows[0].shape[1]), np.float32)
        self.lengths = np.array([len(row) for row in rows])
        self.last = np.cumsum(self.lengths + _NUM_PADS) - 1
        self.first = self.last - self.lengths + 1
        frames = np.concatenate([part for row in rows for part in (pad, row)])
        self._transposed = np.ascontiguousarray(frames.T)
        self._squares = (frames * frames).sum(1)
        is_pad = np.ones(len(frames), bool)
        for first, last in zip(self.first, self.last, strict=True):
            is_pad[first : last + 1] = False
        self._pads = np.flatnonzero(is_pad)

    def __len__(self) -> int:
        return len(self._squares)

    def distances(self, frames: Floats) -> Floats:
        """Distances of `frames` to the templates' frames; pads are far from everything."""
        squared = (frames * frames).sum(1)[:, None] + self._squares - 2 * (frames @ self._transposed)
        found = np.sqrt(np.maximum(squared, 0))
        found[:, self._pads] = _FAR
        return found


def nearest(frames: Floats, readings: Sequence[Floats]) -> int:
    """The index of the reading that is most similar to all of `frames`."""
    templates = _Templates(readings)
    cost = np.full(len(templates), _FAR)
    begun = False
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        for distance in templates.distances(frames[start : start + _FRAMES_AT_ONCE]):
            before = cost
            cost = before + _DETOUR
            np.minimum(cost[1:], before[:-1], out=cost[1:])
            np.minimum(cost[2:], before[:-2] + _DETOUR, out=cost[2:])
            if not begun:
                cost[templates.first] = 0
                begun = True
            cost += distance
            np.minimum(cost, _FAR, out=cost)
    return int(cost[templates.last].argmin())


@dataclass(frozen=True)
class _Exit:
    """The cheapest way to be at the end of a word at some frame."""

    word: int
    entered_at: int
    """The frame at which the word began."""


class Recogniser:
    """Finds connected words: any word may follow any other at every frame. Ignores grammar and codes."""

    def __init__(self, codebook: Codebook, speaker: Speaker) -> None:
        """Raises `OSError` without espeak-ng, which finds words that sound the same."""
        self._names = [unit for unit in codebook.frames if unit not in vocabulary.PAUSES]
        pause = silence(_SILENT_FRAMES)
        rows = []
        for name in self._names:
            wave = render(join([pause, codebook.frames[name], pause]), speaker, _SEED)
            rows.append(hear(wave)[:-_SILENT_FRAMES])
        quiet = hear(render(silence(10), speaker, _SEED))
        self._silence = len(rows)
        self._templates = _Templates([*rows, quiet[5:6]])
        self._entry = np.full(len(rows) + 1, _ENTRY, np.float32)
        self._entry[self._silence] = 0
        self._class_of = _classes(self._names)

    def sound_of(self, unit: str) -> str:
        """The same for units that sound the same."""
        return self._class_of[unit]

    def wanted(self, text: str) -> list[str]:
        """The words to find in a reading of `text`."""
        return [self._class_of[unit] for unit in vocabulary.read(text) if unit not in vocabulary.PAUSES]

    def found(self, frames: Floats) -> list[str]:
        """The words of the cheapest path, each as its `sound_of`."""
        templates = self._templates
        first, last = templates.first, templates.last
        cost = np.full(len(templates), _FAR, np.float32)
        entered = np.zeros(len(templates), np.int32)
        exits: list[_Exit] = []
        cost_of_exit = np.float32(0)
        for start in range(0, len(frames), _FRAMES_AT_ONCE):
            for offset, distance in enumerate(templates.distances(frames[start : start + _FRAMES_AT_ONCE])):
                cost, entered = _step(cost, entered)
                begun = cost_of_exit + self._entry
                begins = begun < cost[first]
                cost[first] = np.where(begins, begun, cost[first])
                entered[first] = np.where(begins, start + offset, entered[first])
                cost += distance
                np.minimum(cost, _FAR, out=cost)
                word = int(cost[last].argmin())
                cost_of_exit = cost[last[word]]
                exits.append(_Exit(word, int(entered[last[word]])))
                # Costs stay small: float32 could not distinguish long paths.
                cost -= cost_of_exit
                cost_of_exit = np.float32(0)
        words: list[str] = []
        at = len(frames) - 1
        while at >= 0:
            leaving = exits[at]
            if leaving.word != self._silence:
                words.append(self._class_of[self._names[leaving.word]])
            at = leaving.entered_at - 1
        return words[::-1]


def _step(
    cost: npt.NDArray[np.float32], entered: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """The cheapest of holding a frame, moving to the next and skipping one, and where that path began."""
    best, origin = cost + np.float32(_DETOUR), entered.copy()
    for stride, detour in ((1, 0.0), (2, _DETOUR)):
        candidate = cost[:-stride] + np.float32(detour)
        is_better = candidate < best[stride:]
        np.copyto(best[stride:], candidate, where=is_better)
        np.copyto(origin[stride:], entered[:-stride], where=is_better)
    return best, origin


def num_in_order(wanted: Sequence[str], found: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(found) + 1)
    for word in wanted:
        before = row
        row = [0]
        for index, other in enumerate(found):
            row.append(before[index] + 1 if word == other else max(before[index + 1], row[index]))
    return row[-1]


def _classes(units: Sequence[str]) -> Mapping[str, str]:
    """Each unit -> the first one with the same phonemes, regardless of stress: "to" and "too" are one."""
    phonemes = _Phonemes()
    first: dict[str, str] = {}
    unstressed = {unit: re.sub("[',]", "", phonemes.of(vocabulary.spoken(unit))) for unit in units}
    return {unit: first.setdefault(sound, unit) for unit, sound in unstressed.items()}


class _Phonemes(Espeak):
    def __init__(self) -> None:
        super().__init__(words_per_minute=200)
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p

    def of(self, text: str) -> str:
        if text.startswith("[["):
            return text.removeprefix("[[").removesuffix("]]")
        # Points to the remaining text; there is none after one word.
        rest = ctypes.c_void_p(ctypes.addressof(buffer := ctypes.create_string_buffer(text.encode())))
        found: list[bytes] = []
        while rest.value:
            found.append(self._library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _ASCII_PHONEMES))
        del buffer
        return b" ".join(found).decode().strip()
