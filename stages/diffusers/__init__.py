"""Diffusers pipelines that generate images: any folder with a `model_index.json` of diffusers' own
classes."""

from stages.diffusers.family import DiffusersFamily

FAMILY = DiffusersFamily()
