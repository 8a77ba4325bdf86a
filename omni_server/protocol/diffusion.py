"""How a request to a diffusion stage carries more than its tokens."""

INPUT_KEY = "omni_input"
"""Key of `PoolingParams.extra_kwargs` whose value is the stage's encoded input, bytes."""

STREAMS_KEY = "omni_streams"
"""Key of `PoolingParams.extra_kwargs`: how many utterances needed code2wav when this was sent, its own among
them. Without the key nobody knows: it is waited for others, and nobody is paced."""
