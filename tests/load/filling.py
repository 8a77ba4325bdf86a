"""Prompts of many lengths, which fill what an engine on a CPU keeps for each number of tokens in a step.

vLLM's CPU build multiplies with oneDNN, which compiles a primitive for each shape of a weight matrix and each
number of rows that it is multiplied with, that is, of tokens in a step. It keeps those that were used last,
in a cache of the process (`ONEDNN_PRIMITIVE_CACHE_CAPACITY`, 1024 by default). An engine grows until that is
full.
"""

import json

from tests.integration.test_server import spoken
from tests.load.answers import Answer, outcome_of
from tests.load.mixed_load import TIMEOUT_S
from tests.load.wire import Ask, exchange
from tests.unit.api.clients import URL


async def fill_caches(port: int, num_lengths: int) -> None:
    """One request after the other, on a server that does nothing else: so many prompts, each one token
    shorter than the one before, none with a beginning that the prefix cache has, each with a word and a few
    codec tokens in reply.

    Thinker and talker process such a prompt in one step. The longest comes first: what malloc gave for it
    then does for all the others; in the other order each finds holes between primitives that are a little too
    small for it. Raises `AssertionError` if one is not answered.
    """
    talker = {"temperature": 0, "max_tokens": 4}
    for number in reversed(range(num_lengths)):
        body = spoken(f"{number} " + "word " * number, max_tokens=2, stage_sampling={"talker": talker})
        ask = Ask("length", URL, "application/json", json.dumps(body).encode())
        outcome = outcome_of(await exchange(port, ask, f"length-{number}", TIMEOUT_S))
        assert isinstance(outcome, Answer), outcome
