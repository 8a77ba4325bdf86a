"""A Qwen2.5-Omni checkpoint with random weights, small enough for tests and for a demo without a download."""

from stages.qwen2_5_omni.demo_checkpoint.sizes import SIZES, DemoSize
from stages.qwen2_5_omni.demo_checkpoint.write import make_demo_checkpoint

__all__ = ["SIZES", "DemoSize", "make_demo_checkpoint"]
