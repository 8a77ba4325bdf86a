"""A checkpoint without a download, of any family.

With random weights it is small enough for tests and demos. Without weights it can have the genuine model's
sizes, for `--load-format dummy`.
"""

from scripts.demo_checkpoint.write import FAMILIES, make_demo_checkpoint

__all__ = ["FAMILIES", "make_demo_checkpoint"]
