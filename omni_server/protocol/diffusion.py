"""How a request to a diffusion stage carries more than its tokens."""

INPUT_KEY = "omni_input"
"""Key of `PoolingParams.extra_kwargs` whose value is the stage's encoded input, bytes."""
