"""Codec tokens to waveform: a flow-matching diffusion transformer and the BigVGAN vocoder."""
