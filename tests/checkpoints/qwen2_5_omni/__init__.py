"""Qwen2.5-Omni."""
