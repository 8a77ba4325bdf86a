"""Sound that looks like speech to an audio encoder: made in code, so that no recording has to travel along."""

import io
import wave

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000

_FORMANTS_HZ = ((700.0, 1200.0, 2600.0), (300.0, 2300.0, 3000.0), (450.0, 800.0, 2600.0), (550.0, 1700.0, 2500.0))
_FORMANT_WIDTH_HZ = 160.0
_SYLLABLE_S = 0.22
_PEAK = 0.5
_HARMONICS_UP_TO_HZ = 4000.0


def speech_like(seconds: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Voiced syllables: harmonics of a wandering pitch under vowel-like formants, rising and falling about 4.5 times
    a second, with a little breath noise.

    Returns mono float32 [round(seconds * 16000)] within -0.5 to 0.5. The same state of `rng` gives the same samples.
    """
    count = round(seconds * SAMPLE_RATE)
    time_s = np.arange(count) / SAMPLE_RATE
    syllables = max(1, int(np.ceil(seconds / _SYLLABLE_S)))
    middles_s = (np.arange(syllables) + 0.5) * _SYLLABLE_S
    pitch_hz = np.interp(time_s, middles_s, rng.uniform(100.0, 200.0, syllables))
    vowels = np.array(_FORMANTS_HZ)[rng.integers(len(_FORMANTS_HZ), size=syllables)]
    formants_hz = [np.interp(time_s, middles_s, vowels[:, formant]) for formant in range(vowels.shape[1])]
    phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE
    voice = np.zeros(count)
    for harmonic in range(1, int(_HARMONICS_UP_TO_HZ / pitch_hz.min()) + 1):
        distances = [(harmonic * pitch_hz - formant_hz) / _FORMANT_WIDTH_HZ for formant_hz in formants_hz]
        gain = np.sum([1 / (1 + distance**2) for distance in distances], axis=0)
        voice += gain * np.sin(harmonic * phase) / np.sqrt(harmonic)
    voice += 0.02 * rng.standard_normal(count)
    voice *= np.sin(np.pi * time_s / _SYLLABLE_S) ** 2 * np.interp(time_s, middles_s, rng.uniform(0.2, 1, syllables))
    return (_PEAK * voice / max(np.abs(voice).max(), 1e-9)).astype(np.float32)


def wav_file(samples: npt.NDArray[np.float32]) -> bytes:
    """A mono 16-bit WAV file at 16 kHz of float samples [n] within -1 to 1."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
