"""A Qwen2.5-Omni checkpoint without a download.

With random weights it is small enough for tests and demos. Without weights it can have the genuine model's
sizes, for `--load-format dummy`.
"""

from scripts.demo_checkpoint.genuine import GENUINE_SIZES
from scripts.demo_checkpoint.sizes import SIZES, DemoSize
from scripts.demo_checkpoint.write import make_demo_checkpoint

__all__ = ["GENUINE_SIZES", "SIZES", "DemoSize", "make_demo_checkpoint"]
