"""How many tokens a stage collects before it sends them to the server."""

TOKENS_PER_OUTPUT_KEY = "omni_tokens_per_output"
"""Key in `SamplingParams.extra_args`: an int n >= 1. The stage sends the request's tokens when their number passes a
multiple of n, and the rest when the request finishes. Without the key each step's tokens are sent at once."""
