"""Imported in the engines' processes, where vLLM looks for `WorkerExtension` (`worker_extension_cls`) before
it loads a model."""

from tests.faults.failing_family import register_failing_models
from tests.faults.orders import wait_while_starts_are_held

register_failing_models()
wait_while_starts_are_held()


class WorkerExtension:
    """Nothing; vLLM adds it to the bases of the worker."""
