"""Imported in the engines' processes, as `engine_side` is."""

from tests.faults.corrupting_family import register_corrupting_models

register_corrupting_models()


class WorkerExtension:
    """Nothing; vLLM adds it to the bases of the worker."""
