"""How a request to a diffusion stage carries more than its tokens."""

INPUT_KEY = "omni_input"
"""Key of `PoolingParams.extra_kwargs` whose value is the stage's encoded input, bytes."""

STREAMS_KEY = "omni_streams"
"""Key of `PoolingParams.extra_kwargs`: the number of active streams when this was sent, including its own.
Without the key the number is unknown: the batch waits for others."""
