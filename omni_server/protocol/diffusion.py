"""How a request to a diffusion stage carries more than its tokens."""

INPUT_KEY = "omni_input"
"""Key of `PoolingParams.extra_kwargs` whose value is the stage's encoded input, bytes."""

COMPANY_KEY = "omni_company"
"""Key of `PoolingParams.extra_kwargs`: True where others may send requests at the same moment, and the stage should
wait for them when it is idle; without the key nobody knows, and it does."""
