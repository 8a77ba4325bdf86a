"""One request through fake stages: what comes out, and in what order."""

import asyncio

import numpy as np

from omni_server.config.pipeline import TokenFrames
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.types import (
    AudioDelta,
    CodecDelta,
    Finished,
    SampledToken,
    TextDelta,
    TextDone,
    TokenLogprob,
    ToolCallDelta,
)
from tests.unit.orchestrator.fake_stages import (
    CODES_PER_OUTPUT,
    FIRST_GENERATED,
    NUM_PROMPT,
    SAMPLES_PER_CODE,
    STOP_CODE,
    Stages,
    collected,
    kinds,
    only,
    settle,
    sound_of,
    write,
)


async def test_text_and_speech_come_as_they_are_made() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await settle()
    stages.token(0)
    await settle()
    stages.token(1)
    await settle()
    stages.talker.stream.send(1, 2)
    await settle()
    stages.token(2, finish="stop")
    await settle()
    stages.talker.stream.send(3, STOP_CODE, finish="stop")
    got = await events
    assert kinds(got) == [
        "TextDelta", "TextDelta", "CodecDelta", "AudioDelta",
        "TextDelta", "TextDone", "CodecDelta", "AudioDelta", "Finished",
    ]  # fmt: skip
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "t0 t1 t2 "
    assert [event.codes for event in got if isinstance(event, CodecDelta)] == [(1, 2), (3,)]
    sounds = [event for event in got if isinstance(event, AudioDelta)]
    assert [sound.first_sample for sound in sounds] == [0, 2 * SAMPLES_PER_CODE]
    assert np.concatenate([sound.samples for sound in sounds]).tolist() == sound_of(1, 2, 3).tolist()
    finished = got[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "stop"
    assert (finished.usage.text_tokens, finished.usage.codec_tokens) == (3, 3)
    assert stages.code2wav.request_ids == ["request-0", "request-1"]
    assert stages.is_released()


async def test_a_given_text_is_spoken_whole_and_what_is_sampled_behind_it_is_not() -> None:
    stages = Stages()
    reply = (41, 42, 43)
    events = asyncio.create_task(collected(stages.run(reply=reply)))
    await settle()
    stages.rows(num_generated=0)
    stages.rows(num_generated=len(reply))
    stages.thinker.stream.send(99, text="sampled", finish="length")
    await settle()
    assert stages.talker.stream.feeds[-1].final_length == FIRST_GENERATED + len(reply)
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    got = await events
    assert kinds(got) == ["TextDelta", "TextDone", "CodecDelta", "AudioDelta", "Finished"]
    assert got[:2] == [TextDelta("given", reply), TextDone("stop")]
    finished = got[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "stop"
    assert finished.usage.text_tokens == len(reply)
    assert stages.is_released()


async def test_a_given_text_without_tokens_has_no_sound() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(reply=())))
    await settle()
    stages.rows(num_generated=0)
    stages.thinker.stream.send(99, text="sampled", finish="length")
    got = await events
    assert kinds(got) == ["TextDelta", "TextDone", "Finished"]
    assert stages.is_released()


async def test_spoken_requests_that_came_at_the_same_moment_reach_the_thinker_together() -> None:
    """The first is a turn of the event loop ahead, in which the second one's prompt is read; text waits for
    nobody."""
    first, second, text = Stages(), Stages(), Stages()
    runs = [first.run()]
    await asyncio.sleep(0)
    runs += [second.run(), text.run(speech=False)]
    opened: list[Stages] = []
    for _ in range(20):
        opened += [
            stages for stages in (first, second, text) if stages.thinker.streams and stages not in opened
        ]
        await asyncio.sleep(0)
    assert opened == [text, first, second]
    for run in runs:
        await run.aclose()


async def test_text_alone_opens_no_other_stage() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False)))
    await settle()
    assert stages.thinker.stream.row_sink is None
    stages.thinker.stream.send(1, 2, text="ab", finish="length")
    got = await events
    assert kinds(got) == ["TextDelta", "TextDone", "Finished"]
    assert isinstance(got[-1], Finished)
    assert got[-1].finish_reason == "length"
    assert stages.talker.streams == []
    assert stages.is_released()


async def test_an_output_without_tokens_is_no_event() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False)))
    await settle()
    stages.thinker.stream.send()
    stages.thinker.stream.send(1, text="", finish=None)
    stages.thinker.stream.send(finish="stop")
    assert kinds(await events) == ["TextDelta", "TextDone", "Finished"]


async def test_tokens_of_the_prefix_cache_are_counted() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False)))
    await settle()
    stages.thinker.stream.send(1, text="a", finish="stop")
    finished = only(Finished, await events)
    assert isinstance(finished, Finished)
    assert finished.usage.prompt.cached == 2


async def test_the_talker_is_fed_rows_in_order_and_then_the_end() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 4)
    feeds = stages.talker.stream.feeds
    assert [feed.payload.segments[0].first_position for feed in feeds[:-1] if feed.payload] == [0, 4, 5, 6]
    assert [feed.num_released for feed in feeds] == [None] * 5
    # The end token was never computed: text end stands at its place.
    assert feeds[-1].payload is None
    assert [feed.final_length for feed in feeds] == [None] * 4 + [FIRST_GENERATED + 3]
    assert stages.talker.prompts == [(8,) * NUM_PROMPT + (6, 7)]
    stages.talker.stream.send(STOP_CODE, finish="stop")
    assert kinds(await events)[-2:] == ["TextDone", "Finished"]
    assert stages.is_released()


async def test_a_reply_of_one_token_has_no_sound_and_releases_the_talker() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 1)
    got = await asyncio.wait_for(events, 5)
    assert kinds(got) == ["TextDelta", "TextDone", "Finished"]
    assert stages.talker.stream.num_closed == 1
    assert all(feed.final_length is None for feed in stages.talker.stream.feeds), "it would start to speak"
    assert stages.is_released()


async def test_a_reply_of_one_token_by_length_is_incomplete() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await settle()
    stages.token(0, finish="length")
    finished = (await asyncio.wait_for(events, 5))[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "length"


async def test_a_talker_at_its_limit_makes_the_answer_incomplete() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(5, STOP_CODE, finish="length")
    got = await events
    codes = only(CodecDelta, got)
    assert isinstance(codes, CodecDelta)
    assert codes.codes == (5, STOP_CODE), "what ended at the limit did not end with a stop code"
    text_done, finished = only(TextDone, got), got[-1]
    assert isinstance(text_done, TextDone)
    assert isinstance(finished, Finished)
    assert (text_done.finish_reason, finished.finish_reason) == ("stop", "length")


async def test_a_talker_that_ends_first_does_not_end_the_text() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await settle()
    for number in range(2):
        stages.token(number)
    await settle()
    stages.talker.stream.send(5, STOP_CODE, finish="stop")
    await settle()
    for number in range(2, 4):
        stages.token(number, finish="stop" if number == 3 else None)
        await settle()
    got = await asyncio.wait_for(events, 5)
    assert kinds(got).count("TextDelta") == 4
    assert stages.is_released()


async def test_codes_without_sound_are_no_event() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(STOP_CODE, finish="stop")
    assert not {"CodecDelta", "AudioDelta"} & set(kinds(await events))


async def test_with_stop_strings_only_released_text_may_be_spoken() -> None:
    stages = Stages()
    words = {100: "Hi ", 101: "th", 102: "ere"}
    run = stages.run(detokenize=lambda ids: "".join(words[token_id] for token_id in ids))
    events = asyncio.create_task(collected(run))
    await settle()
    stages.rows(num_generated=0)
    stages.thinker.stream.send(100, text="H")  # "i " could begin a stop string
    await settle()
    stages.rows(num_generated=1)
    stages.thinker.stream.send(101, text="i t")
    await settle()
    stages.rows(num_generated=2)
    stages.thinker.stream.send(102, text="h", finish="stop")  # "ere" was one
    await settle()
    feeds = stages.talker.stream.feeds
    assert [feed.num_released for feed in feeds[:-1] if feed.payload is None] == [
        FIRST_GENERATED + 1,
        FIRST_GENERATED + 2,
    ]
    assert [feed.num_released for feed in feeds if feed.payload is not None] == [
        FIRST_GENERATED,
        FIRST_GENERATED,
        FIRST_GENERATED + 1,
    ]
    assert feeds[-1].final_length == FIRST_GENERATED + 2
    stages.talker.stream.send(STOP_CODE, finish="stop")
    await events
    assert stages.is_released()


async def test_a_stop_string_at_the_very_beginning_leaves_nothing_to_speak() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(detokenize=lambda ids: "STOP!"[: 2 * len(ids)])))
    await settle()
    stages.rows(num_generated=0)
    stages.thinker.stream.send(100)
    stages.rows(num_generated=1)
    stages.thinker.stream.send(101, finish="stop")
    got = await asyncio.wait_for(events, 5)
    assert not {"CodecDelta", "AudioDelta"} & set(kinds(got))
    assert stages.is_released()


async def test_codes_are_asked_for_in_blocks_and_text_is_not() -> None:
    stages = Stages()
    run = stages.run()
    await write(stages, 3)
    assert stages.thinker.stream.tokens_per_output == 1
    assert stages.talker.stream.tokens_per_output == CODES_PER_OUTPUT
    await run.aclose()


async def test_sampled_and_predicted_codes_become_frames() -> None:
    stages = Stages()
    run = stages.run(frames=TokenFrames(num_codebooks=3, num_predicted=2))
    events = asyncio.create_task(collected(run))
    await write(stages, 3)
    assert stages.talker.stream.tokens_per_output == CODES_PER_OUTPUT
    stages.talker.stream.send(1, 2, predicted=[[10, 11], [20, 21]])
    stages.talker.stream.send(3, STOP_CODE, predicted=[[30, 31], [98, 98]], finish="stop")
    got = await asyncio.wait_for(events, 5)
    codes = [event.codes for event in got if isinstance(event, CodecDelta)]
    assert codes == [(1, 10, 11, 2, 20, 21), (3, 30, 31)]
    assert stages.edge.frames == [(1, 10, 11), (2, 20, 21), (3, 30, 31)]
    (finished,) = (event for event in got if isinstance(event, Finished))
    assert finished.usage.codec_tokens == 3


async def test_a_limit_on_the_length_keeps_the_last_frame() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(frames=TokenFrames(2, 1))))
    await write(stages, 3)
    stages.talker.stream.send(1, 2, predicted=[[10], [20]], finish="length")
    await asyncio.wait_for(events, 5)
    assert stages.edge.frames == [(1, 10), (2, 20)]


async def test_rows_that_come_while_the_talker_is_being_opened_follow_in_one_message() -> None:
    stages = Stages()
    stages.talker.open_gate.clear()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    assert stages.talker.messages == []
    stages.talker.open_gate.set()
    await settle()
    (message,) = stages.talker.messages
    assert [feed for _, feed in message] == stages.talker.stream.feeds
    assert [feed.payload is None for _, feed in message] == [False, False, False, True]
    stages.talker.stream.send(STOP_CODE, finish="stop")
    await events
    assert stages.is_released()


async def test_rows_of_several_requests_that_arrive_together_are_one_message() -> None:
    stages = Stages()
    runs = [stages.run(), stages.run()]
    await settle()
    for num_generated in range(2):
        for stream in stages.thinker.streams:
            assert stream.row_sink is not None
            stream.row_sink(stages.payload(num_generated=num_generated))
        await settle()
    assert [engine_id for engine_id, _ in stages.talker.messages[-1]] == ["talker-0", "talker-1"]
    for run in runs:
        await run.aclose()


async def test_rows_that_come_after_the_talker_has_ended_are_dropped() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await settle()
    stages.token(0)
    stages.token(1)
    await settle()
    stages.talker.stream.send(5, STOP_CODE, finish="stop")
    await settle()
    stages.token(2)
    assert stages.dropped == stages.blocks[-1:]
    stages.token(3, finish="stop")
    await asyncio.wait_for(events, 5)
    assert stages.is_released()


async def test_the_end_tells_when_each_stage_was_passed() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(1, 2, 3, STOP_CODE, finish="stop")
    finished = (await events)[-1]
    assert isinstance(finished, Finished)
    assert list(finished.times) == ["thinker", "talker", "code2wav"]
    thinker, talker, code2wav = finished.times.values()
    speech = [
        talker.submitted_s,
        talker.first_output_s,
        code2wav.submitted_s,
        code2wav.first_output_s,
        code2wav.last_output_s,
    ]
    known = [moment for moment in speech if moment is not None]
    assert len(known) == 5
    assert sorted(known) == known
    assert len(code2wav.windows) == 2
    assert thinker.first_output_s is not None
    assert thinker.last_output_s is not None
    assert thinker.submitted_s < thinker.first_output_s < thinker.last_output_s


async def test_a_reply_in_text_has_no_times_of_speech() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False)))
    await settle()
    stages.thinker.stream.send(1, text="a", finish="stop")
    finished = (await events)[-1]
    assert isinstance(finished, Finished)
    assert list(finished.times) == ["thinker"]
    assert finished.times["thinker"].first_output_s is not None


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


async def test_a_call_is_an_event_of_its_own_and_ends_the_answer() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False, tool_parser=ToolParser())))
    await settle()
    stages.thinker.stream.send(1, text="Hm")
    stages.thinker.stream.send(2, text=CALL, finish="stop")
    got = await events
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "Hm"
    calls = [event for event in got if isinstance(event, ToolCallDelta)]
    assert [(call.index, call.name, call.arguments) for call in calls] == [
        (0, "look", ""),
        (0, None, '{"at": 1}'),
    ]
    finished = got[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "tool_calls"
    assert finished.usage.text_tokens == 2


async def test_a_call_that_was_cut_is_incomplete() -> None:
    stages = Stages()
    events = asyncio.create_task(collected(stages.run(speech=False, tool_parser=ToolParser())))
    await settle()
    stages.thinker.stream.send(1, text=CALL[:-20], finish="length")
    finished = (await events)[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "length"


async def test_an_answer_that_is_a_call_is_not_spoken() -> None:
    stages = Stages()
    words = {
        100: "<tool_call>",
        101: '\n{"name": "look", "arguments": {"at": 1}}\n',
        102: "</tool_call>",
        103: "",
    }
    run = stages.run(detokenize=lambda ids: "".join(words[i] for i in ids), tool_parser=ToolParser())
    events = asyncio.create_task(collected(run))
    await settle()
    for number in range(4):
        stages.token(number, text=words[100 + number], finish="stop" if number == 3 else None)
        await settle()
    got = await asyncio.wait_for(events, 5)
    assert [feed.num_released for stream in stages.talker.streams for feed in stream.feeds] == [
        FIRST_GENERATED
    ] * 4
    assert not {"CodecDelta", "AudioDelta"} & set(kinds(got))
    finished = got[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage.codec_tokens) == ("tool_calls", 0)
    assert stages.is_released()


async def test_what_is_said_before_a_call_is_spoken_and_nothing_else() -> None:
    stages = Stages()
    words = {100: "Hm", 101: ".", 102: "\n", 103: CALL, 104: "x", 105: ""}
    run = stages.run(detokenize=lambda ids: "".join(words[i] for i in ids), tool_parser=ToolParser())
    events = asyncio.create_task(collected(run))
    await settle()
    for number in range(6):
        stages.rows(num_generated=number)
        stages.thinker.stream.send(
            100 + number, text=words[100 + number], finish="stop" if number == 5 else None
        )
        await settle()
    assert stages.talker.stream.feeds[-1].final_length == FIRST_GENERATED + 2
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    got = await events
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "Hm."
    assert isinstance(only(AudioDelta, got), AudioDelta)
    assert stages.is_released()


async def test_prose_in_a_turn_with_tools_is_spoken_to_its_end() -> None:
    stages = Stages()
    words = {100: "Hm", 101: " \n", 102: ""}
    run = stages.run(detokenize=lambda ids: "".join(words[i] for i in ids), tool_parser=ToolParser())
    events = asyncio.create_task(collected(run))
    await settle()
    for number in range(3):
        stages.rows(num_generated=number)
        stages.thinker.stream.send(
            100 + number, text=words[100 + number], finish="stop" if number == 2 else None
        )
        await settle()
    assert stages.talker.stream.feeds[-1].final_length == FIRST_GENERATED + 2
    stages.talker.stream.send(STOP_CODE, finish="stop")
    got = await events
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "Hm \n"


async def test_log_probabilities_come_with_the_text_of_their_tokens_and_end_with_it() -> None:
    stages = Stages()
    tokens = [SampledToken(TokenLogprob(text, text.encode(), -1.0), ()) for text in ("Hi ", "th", "ere")]
    events = asyncio.create_task(collected(stages.run(speech=False)))
    await settle()
    stages.thinker.stream.send(1, text="H", logprobs=(tokens[0],))
    stages.thinker.stream.send(2, text="i t", logprobs=(tokens[1],))
    stages.thinker.stream.send(3, text="h", logprobs=(tokens[2],), finish="stop", is_cut=True)
    deltas = [event for event in await events if isinstance(event, TextDelta)]
    assert [delta.logprobs for delta in deltas] == [(), (tokens[0],), (tokens[1],)]
