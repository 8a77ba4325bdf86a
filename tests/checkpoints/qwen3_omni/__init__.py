"""Qwen3-Omni."""
