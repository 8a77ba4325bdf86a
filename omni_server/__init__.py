"""OpenAI-compatible server for speech-to-speech models that run as a pipeline of stages on vLLM.

Importing this package imports neither torch nor vLLM: torch itself loads
`omni_server.platform.cpu_extensions` in every process (entry-point group `torch.backends`), so `Omni` and
`AsyncOmni` are imported on first use.
"""

from typing import TYPE_CHECKING

from omni_server.version import VERSION as __version__

if TYPE_CHECKING:
    from omni_server.offline import Omni
    from omni_server.omni import AsyncOmni

__all__ = ["AsyncOmni", "Omni", "__version__"]


def __getattr__(name: str) -> object:
    if name == "AsyncOmni":
        from omni_server.omni import AsyncOmni

        return AsyncOmni
    if name == "Omni":
        from omni_server.offline import Omni

        return Omni
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
