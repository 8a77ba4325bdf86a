"""Qwen2.5-Omni: thinker -> talker -> code2wav. A stage config names `stages.qwen2_5_omni:FAMILY`."""

from stages.qwen2_5_omni.family import Qwen25OmniFamily

FAMILY = Qwen25OmniFamily()
