"""The checklist of `POST /v1/chat/completions`: which test shows each row.

C rows are answers in one piece, S rows streams. A reference is FILE::TEST; bad::CASE names a case of `REFUSED` (a 400
that names the field, without the generator having been asked). Files: see `FILES`.
"""

import re
from pathlib import Path

import pytest

from tests.unit.api.test_bad_requests import REFUSED

TESTS = Path(__file__).parents[2]
FILES = {
    "complete": "unit/api/test_chat_complete.py",
    "stream": "unit/api/test_chat_stream.py",
    "bad": "unit/api/test_bad_requests.py",
    "sampling": "unit/api/test_sampling.py",
    "choices": "unit/api/test_choices.py",
    "structure": "unit/api/test_structure.py",
    "tools": "unit/api/test_tools.py",
    "media_input": "unit/api/test_media_input.py",
    "source": "unit/media/test_source.py",
    "audio": "unit/media/test_decode_audio.py",
    "voices": "unit/api/test_voices.py",
    "disconnect": "unit/api/test_disconnect.py",
    "server": "integration/test_server.py",
    "held": "integration/test_server_structure.py",
}

SHOWN: dict[str, list[str]] = {
    "C01 text": ["complete::test_text_answer_has_content_and_no_audio", "server::test_official_client_reads_text"],
    "C02 wav": [
        "complete::test_spoken_answer_has_audio_with_transcript_and_null_content",
        "server::test_spoken_answer_has_sound_for_every_codec_token",
    ],
    "C03 other formats": [
        "complete::test_every_file_format_can_be_decoded",
        "complete::test_pcm16_is_headerless",
        "server::test_every_file_format_holds_the_same_speech",
    ],
    "C04 aac": ["bad::format aac"],
    "C05 webm": ["bad::format unknown"],
    "C06 no audio object": ["bad::audio object missing", "bad::audio null"],
    "C07 no voice": ["bad::voice missing"],
    "C08 no format": ["bad::format missing"],
    "C09 unknown voice": ["bad::voice unknown", "bad::test_unknown_voice_names_the_voices_there_are"],
    "C10 voice by id": ["voices::test_voice_is_found_in_every_spelling"],
    "C11 alloy": [
        "voices::test_alloy_is_the_default_voice",
        "server::test_voices_say_the_same_text_with_different_sound",
    ],
    "C12 modalities": ["bad::modality unknown", "bad::modalities empty", "bad::modalities a string"],
    "C13 audio alone": ["complete::test_modalities_of_audio_alone_are_answered_with_a_transcript_too"],
    "C14 audio object, text": [
        "complete::test_audio_object_without_the_modality_is_ignored",
        "server::test_audio_object_without_the_modality_is_ignored",
    ],
    "C15 wav in": ["server::test_speech_is_heard_in_every_spelling", "server::test_what_is_said_changes_the_answer"],
    "C16 mp3, flac, ogg in": [
        "audio::test_files_keep_rate_and_duration",
        "server::test_what_is_said_changes_the_answer",
    ],
    "C17 data URLs": ["media_input::test_sound_is_accepted_in_every_spelling"],
    "C18 bad base64": ["media_input::test_bad_sound_is_refused_with_the_part_that_holds_it"],
    "C19 no samples": ["audio::test_a_file_of_no_samples_is_refused"],
    "C20 declared mp3, is wav": ["media_input::test_bytes_overrule_the_declared_audio_format"],
    "C21 PNG": ["server::test_images_are_seen"],
    "C22 cut PNG": ["media_input::test_picture_and_video_cut_short_are_refused", "server::test_bad_media_are_refused"],
    "C23 mp4": ["server::test_video_is_seen"],
    "C24 audio_url": ["server::test_speech_is_heard_in_every_spelling"],
    "C25 all kinds": ["server::test_all_kinds_together_are_answered_by_voice"],
    "C26 too many": ["media_input::test_more_media_than_the_model_takes_are_refused_before_any_is_read"],
    "C27 file URL": [
        "media_input::test_bad_url_is_refused_with_the_part_that_holds_it",
        "source::test_other_schemes_are_refused",
    ],
    "C28 private hosts": [
        "source::test_without_an_allow_list_no_host_is_asked",
        "source::test_addresses_that_are_not_public",
    ],
    "C29 redirect": ["source::test_a_redirect_to_an_allowed_name_at_a_private_address_is_refused"],
    "C30 slow host": ["source::test_a_slow_server_is_given_up"],
    "C31 unknown part": ["bad::part of unknown type"],
    "C32 messages": ["bad::messages empty", "bad::messages missing", "bad::messages not a list"],
    "C33 role": ["bad::role unknown"],
    "C34 bounds": [
        "bad::temperature too high",
        "bad::temperature negative",
        "bad::top_p too high",
        "bad::presence_penalty too high",
    ],
    "C35 n": [
        "bad::n zero",
        "choices::test_choices_of_an_answer_by_voice_are_refused",
        "choices::test_every_choice_is_a_request_with_a_seed_of_its_own",
        "held::test_choices_differ_and_are_repeatable_by_their_seed",
    ],
    "C36 stop strings": ["bad::five stop strings"],
    "C37 stop": ["server::test_stop_string_cuts_the_text_and_is_not_spoken"],
    "C38 one token": [
        "server::test_thinker_writes_exactly_as_many_tokens_as_it_is_told",
        "server::test_very_short_texts_are_spoken",
    ],
    "C39 both limits": ["sampling::test_max_completion_tokens_wins"],
    "C40 max_tokens": ["bad::max_tokens zero", "bad::max_tokens negative"],
    "C41 seed": ["sampling::test_seed_reaches_every_stage", "server::test_seed_makes_sampled_answers_repeatable"],
    "C42 logprobs": [
        "choices::test_bytes_of_the_tokens_join_to_the_text",
        "held::test_greedy_tokens_are_the_likeliest_and_join_to_the_text",
        "held::test_log_probabilities_are_those_of_the_reference",
    ],
    "C43 top_logprobs": ["bad::top_logprobs alone", "bad::top_logprobs too many", "bad::top_logprobs negative"],
    "C44 tools": [
        "tools::test_answer_that_is_a_call_has_no_content",
        "held::test_call_that_a_free_model_makes_is_silent_and_what_it_says_before_is_not",
        "held::test_required_call_has_arguments_by_the_schema",
    ],
    "C45 tool result": [
        "tools::test_calls_and_results_of_earlier_turns_reach_the_model_in_order",
        "held::test_results_of_calls_are_read",
    ],
    "C46 tools": [
        "bad::tools empty",
        "bad::tool_choice without tools",
        "bad::tool_choice of another",
        "bad::tool_choice named without tools",
    ],
    "C47 JSON schema": [
        "held::test_answer_follows_a_json_schema",
        "held::test_official_client_parses_an_answer_into_a_model",
    ],
    "C48 bad schema": [
        "bad::JSON schema missing",
        "held::test_what_the_engine_would_refuse_is_refused_before_a_stream_begins",
    ],
    "C49 stream_options": ["bad::stream_options without stream"],
    "C50 too long": ["server::test_prompt_that_is_too_long_is_refused"],
    "C51 unknown field": ["complete::test_unknown_and_bookkeeping_fields_are_ignored"],
    "C52 bookkeeping": ["complete::test_unknown_and_bookkeeping_fields_are_ignored"],
    "C53 metadata": ["bad::metadata of 17"],
    "C54 unknown model": [
        "bad::test_unknown_model_is_not_found",
        "server::test_official_client_raises_the_class_of_each_mistake",
    ],
    "C55 audio id": ["server::test_earlier_speech_is_referred_to_by_its_id"],
    "C56 message sent back": [
        "complete::test_message_of_the_official_client_can_be_sent_back_whole",
        "tools::test_official_clients_message_can_be_sent_back",
    ],
    "C57 unknown id": [
        "complete::test_unknown_audio_id_is_the_clients_mistake",
        "server::test_audio_id_that_nobody_was_given_is_refused",
    ],
    "C58 id of another key": ["complete::test_audio_id_is_worth_nothing_to_another_key"],
    "C59 sound of videos": ["bad::sound track of videos"],
    "C60 many at once": [
        "server::test_concurrent_requests_are_answered_as_one_by_one",
        "held::test_64_callers_at_once_are_all_answered",
    ],
    "C61 leaving": [
        "disconnect::test_leaving_before_the_whole_answer_closes_the_generation",
        "server::test_client_that_leaves_before_a_whole_answer_frees_everything",
    ],
    "S01 frames": ["stream::test_text_stream_is_role_then_content_then_finish"],
    "S02 role": ["stream::test_text_stream_is_role_then_content_then_finish"],
    "S03 no usage": ["stream::test_include_usage_false_adds_no_usage"],
    "S04 usage": [
        "stream::test_text_stream_carries_length_and_usage",
        "server::test_text_is_the_same_in_one_piece_and_streamed",
    ],
    "S05 pcm16": [
        "stream::test_speech_stream_interleaves_transcript_and_samples",
        "server::test_streamed_speech_equals_that_in_one_piece",
    ],
    "S06 accumulator": [
        "stream::test_official_accumulator_rebuilds_the_message",
        "server::test_official_accumulator_rebuilds_the_spoken_answer",
    ],
    "S07 as in one piece": ["server::test_streamed_speech_equals_that_in_one_piece"],
    "S08 wav": ["stream::test_wav_stream_has_one_header_and_can_be_read_as_a_file"],
    "S09 flac": ["stream::test_format_that_cannot_be_streamed_is_refused_before_the_stream"],
    "S10 first frame": [
        "stream::test_role_is_sent_before_the_first_event",
        "stream::test_silence_is_filled_with_comments",
    ],
    "S11 pace": [
        "stream::test_each_event_leaves_as_soon_as_it_is_there",
        "server::test_sound_leaves_while_the_text_is_still_written",
    ],
    "S12 calls": [
        "tools::test_streamed_call_has_id_and_name_once",
        "tools::test_official_accumulator_rebuilds_calls",
        "held::test_required_call_has_arguments_by_the_schema",
    ],
    "S13 calls by voice": [
        "tools::test_streamed_call_in_an_answer_by_voice_has_no_audio",
        "held::test_call_that_was_asked_for_by_voice_is_silent",
        "held::test_prose_in_a_turn_with_tools_is_spoken_as_ever",
    ],
    "S14 n": [
        "choices::test_streamed_choices_open_in_order_and_come_as_they_are_made",
        "held::test_streamed_choices_are_the_same",
    ],
    "S15 finish": [
        "stream::test_text_stream_is_role_then_content_then_finish",
        "choices::test_streamed_choices_open_in_order_and_come_as_they_are_made",
    ],
    "S16 dead engine": [
        "stream::test_official_client_raises_for_a_failure_in_a_stream",
        "server::test_killed_engine_ends_the_stream_with_an_error_and_then_the_server",
    ],
    "S17 leaving": [
        "disconnect::test_leaving_a_stream_closes_the_generation",
        "server::test_clients_that_leave_free_everything",
    ],
    "S18 refusal": ["stream::test_refusal_at_submission_is_no_stream", "bad::test_bad_field_is_refused_with_its_name"],
    "S19 characters": [
        "stream::test_text_stream_is_role_then_content_then_finish",
        "held::test_characters_of_several_tokens_are_never_cut",
    ],
    "S20 compression": ["stream::test_streams_are_not_compressed"],
}


def test_every_row_is_shown() -> None:
    rows = [f"C{number:02}" for number in range(1, 62)] + [f"S{number:02}" for number in range(1, 21)]
    assert sorted(name[:3] for name in SHOWN) == rows


@pytest.mark.parametrize("row", SHOWN)
def test_every_test_that_is_named_exists(row: str) -> None:
    cases = {case[0] for case in REFUSED}
    for reference in SHOWN[row]:
        file, _, name = reference.partition("::")
        source = (TESTS / FILES[file]).read_text()
        is_test = re.search(rf"^ *(async )?def {re.escape(name)}\(", source, re.MULTILINE) is not None
        assert is_test or (file == "bad" and name in cases), reference
