"""Imported in the engines' processes, where vLLM looks for `WorkerExtension` (`worker_extension_cls`) before
it loads a model."""

from tests.faults.failing_family import register_failing_models

register_failing_models()


class WorkerExtension:
    """Nothing; vLLM adds it to the bases of the worker."""
