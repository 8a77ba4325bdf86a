"""transformers logs each configuration that it loads, below the level that is shown, and compares it with
another one for that: loading one of an Omni model takes 0.2 s of processor time instead of 0.01. This module
prevents it."""

from transformers import PreTrainedConfig

PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]
