"""Qwen3-TTS: talker -> code2wav. A stage config names `stages.qwen3_tts:FAMILY`."""

from stages.qwen3_tts.family import Qwen3TTSFamily

FAMILY = Qwen3TTSFamily()
