"""Codec frames to waveform: a causal transformer and a causal convolutional decoder with state per stream."""
