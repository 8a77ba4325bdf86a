"""A Qwen2.5-Omni checkpoint without a download.

With random weights it is small enough for tests and for a demo. Without weights it may have the sizes of the
genuine model, for `--load-format dummy`.
"""

from stages.qwen2_5_omni.demo_checkpoint.genuine import GENUINE_SIZES
from stages.qwen2_5_omni.demo_checkpoint.sizes import SIZES, DemoSize
from stages.qwen2_5_omni.demo_checkpoint.write import make_demo_checkpoint

__all__ = ["GENUINE_SIZES", "SIZES", "DemoSize", "make_demo_checkpoint"]
