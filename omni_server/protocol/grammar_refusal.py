"""Why a stage gave up a request's grammar: the `stop_reason` of an output whose finish reason is "error"."""

GRAMMAR_TOO_SLOW = "omni_grammar_too_slow"
"""To follow the grammar took more time than one request may take from all others."""
GRAMMAR_ALLOWS_NOTHING = "omni_grammar_allows_nothing"
"""No token can follow, and the text may not end either: a rule that needs itself, as in `{"$ref": "#"}`."""
GRAMMARS_BUSY = "omni_grammars_busy"
"""Grammars of other requests were given up, but have not come to an end yet."""
