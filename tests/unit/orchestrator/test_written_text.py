"""What is handed on of a text that one stage writes and another reads aloud."""

import pytest

from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.generation import Deliver
from omni_server.orchestrator.fair_share import FairShareQueue
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.speech_tasks import TextOutput
from omni_server.orchestrator.text_source import WrittenText
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.types import FinishReason, OmniEvent, TextDelta
from stages.spoken_llm.spoken_text_filter import SpokenTextFilter

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


async def handed_on(written: WrittenText) -> list[str]:
    return [piece async for piece in written.pieces()]


@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_what_precedes_a_call_is_spoken_and_the_text_has_all_of_it(finish: FinishReason) -> None:
    events: list[OmniEvent | Exception] = []
    deliver: Deliver = events.append
    run = RequestRun("request", FairShareQueue().take("caller"), deliver)
    run.timeline.mark_submitted("thinker")
    written = WrittenText(SpokenTextFilter())
    parser = ToolParser(is_parallel=True)
    output = TextOutput(run, "thinker", RenderedPrompt((1,), None), tool_parser=parser, written=written)
    texts = ["I *look*", " it up. ", *CALL, " Done."]
    for number, text in enumerate(texts, 1):
        ending = finish if number == len(texts) else None
        output.take(ArOutput((number,), text, ending, num_cached_tokens=0))
    assert "".join(await handed_on(written)).strip() == "I look it up."
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "I *look* it up."
