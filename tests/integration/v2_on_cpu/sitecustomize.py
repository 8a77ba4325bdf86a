"""For child processes of tests that have this folder on their PYTHONPATH: vLLM's V2 model runner on a CPU.

Python imports this module by itself, in the engines' processes too. V2's kernels are written in Triton, which cannot
compile for a CPU but can interpret them. vLLM asks for a Triton backend named "cpu" before it believes that.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import Backend, backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = Backend(compiler=None, driver=_Driver)
