"""Folders of Diffusers pipelines."""
