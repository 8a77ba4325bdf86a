"""Any language model, whose answers Qwen3-TTS reads aloud: thinker -> talker -> code2wav. A stage config
names `stages.spoken_llm:FAMILY`."""

from stages.spoken_llm.family import SpokenLLMFamily

FAMILY = SpokenLLMFamily()
