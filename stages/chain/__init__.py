"""A text model that writes the prompt of an image, and a Diffusers pipeline that generates it."""

from stages.chain.family import ChainFamily

FAMILY = ChainFamily()
