"""Entry points for vLLM's plugin groups. They run in every process of every engine."""

from omni_server.family import families_of_this_process


def register() -> None:
    """Register the model classes of the served family with vLLM, or those of all installed families if no
    server specifies one (`vllm.general_plugins`)."""
    for family in families_of_this_process():
        family.register()


def cpu_platform() -> str | None:
    """Returns the class of the platform if vLLM runs on CPUs (`vllm.platform_plugins`)."""
    from vllm.platforms import cpu_platform_plugin

    return cpu_platform_plugin() and "stages.runtime.cpu_platform.ForkedCpuPlatform"
