"""Qwen3-Omni: thinker -> talker -> code2wav. A stage config names `stages.qwen3_omni:FAMILY`."""

from stages.qwen3_omni.family import Qwen3OmniFamily

FAMILY = Qwen3OmniFamily()
