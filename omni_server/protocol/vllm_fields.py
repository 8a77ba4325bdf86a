"""Values that our server and stages put into fields of vLLM's requests and outputs."""

TOKENS_PER_OUTPUT_KEY = "omni_tokens_per_output"
"""Key in `SamplingParams.extra_args`: numbers of tokens, each at least 1. The stage sends the request's tokens
in blocks of these sizes, whose last applies to all further blocks, and the rest when the request finishes.
Without the key, the tokens of each step are sent immediately."""

# Why a stage gave up a request's grammar: `stop_reason` of an output whose finish reason is "error".
GRAMMAR_TOO_SLOW = "omni_grammar_too_slow"
"""Following the grammar took more time than one request may take from all others."""
GRAMMAR_ALLOWS_NOTHING = "omni_grammar_allows_nothing"
"""No token can follow, and the text may not end: a rule that requires itself, as in `{"$ref": "#"}`."""
GRAMMARS_BUSY = "omni_grammars_busy"
"""Grammars of other requests were given up but have not ended yet."""
