"""espeak-ng, through its C library: one word at a time, in a monotone."""

import ctypes

import numpy as np
import numpy.typing as npt

_LIBRARY = "libespeak-ng.so.1"
_SYNCHRONOUS_AUDIO = 2  # AUDIO_OUTPUT_SYNCHRONOUS: samples go to the callback
_RATE, _PITCH, _PITCH_RANGE = 1, 3, 4  # espeak_PARAMETER
_CHARACTERS_UTF8, _PHONEMES = 1, 0x100  # flags of espeak_Synth
_FULL_SCALE = 32768


class Espeak:
    def __init__(self, *, voice: str = "en-us", words_per_minute: int, pitch: int = 40) -> None:
        """Raises `OSError` if espeak-ng is not installed, and `RuntimeError` if it has no such voice."""
        self._library = ctypes.CDLL(_LIBRARY)
        self.sample_rate_hz: int = self._library.espeak_Initialize(_SYNCHRONOUS_AUDIO, 0, None, 0)
        self._chunks: list[npt.NDArray[np.int16]] = []
        callback_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = callback_type(self._receive)  # the library holds a bare pointer to it
        self._library.espeak_SetSynthCallback(self._callback)
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {voice!r}")
        for parameter, value in ((_RATE, words_per_minute), (_PITCH, pitch), (_PITCH_RANGE, 0)):
            self._library.espeak_SetParameter(parameter, value, 0)

    def __call__(self, text: str) -> npt.NDArray[np.float32]:
        """The waveform of `text`, which may hold phonemes in [[...]]: float32 [num_samples], -1 to 1."""
        self._chunks.clear()
        data = text.encode() + b"\0"
        flags = _CHARACTERS_UTF8 | _PHONEMES
        self._library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, flags, None, None)
        self._library.espeak_Synchronize()
        return np.concatenate(self._chunks).astype(np.float32) / np.float32(_FULL_SCALE)

    def _receive(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: int) -> int:
        if count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
