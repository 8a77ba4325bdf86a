"""A producer that sends only the rows of media, at the positions that these have in the consumer's prompt."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
    _get_feat_extract_output_lengths,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from omni_server.protocol.rows import (
    RowsFeed,
    RowsInput,
    RowsOutput,
    RowsPayload,
    SharedBlock,
    SourceSpan,
    TextSegment,
)
from omni_server.transport.slab_queue import SlabQueue
from stages.qwen_omni.audio_in_video import SECONDS_PER_GRID
from stages.qwen_omni.media_positions import MediaPositions
from stages.runtime.embedding_store import RowStore
from stages.runtime.embeddings_out import consumer_prompt, last_sent
from stages.runtime.fractional_positions import unpacked
from tests.unit.stages.row_stream import WIDTH, Producer, Spoken, inline_spec, shared_queue, stored_rows

# A source prompt of 12 tokens: two of another turn, a turn with media, one without, and one with media.
#   source 0 1 | 2 M M M 6 | 7 8 | 9 M 11      target 0 1 2 3 4 | 5 6 7
SPANS = (
    SourceSpan(2, 0, 1, has_rows=False),
    SourceSpan(3, 1, 3, has_rows=True),
    SourceSpan(6, 4, 1, has_rows=False),
    SourceSpan(9, 5, 1, has_rows=False),
    SourceSpan(10, 6, 1, has_rows=True),
    SourceSpan(11, 7, 1, has_rows=False),
)
LENGTH = 12
MEDIA = {1: 3, 2: 4, 3: 5, 6: 10}  # target -> source
# The second turn's text begins below the greatest position of the first turn's media.
POSITIONS = torch.tensor([0, 1, 2.5, 4, 3.5, 4.5, 5.5, 6.5, 7.5]).expand(3, -1)


@pytest.fixture(params=["inline", "shared_memory"])
def producer(request: pytest.FixtureRequest) -> Iterator[tuple[Producer, SlabQueue | None]]:
    if request.param == "inline":
        yield Producer(inline_spec(), None), None
        return
    spec, queue = shared_queue()
    yield Producer(spec, queue), queue
    queue.close()


def sending(producer: Producer, request_id: str = "r", *, seed: int = 0) -> Spoken:
    made = Spoken(request_id, [1] * LENGTH, 6, seed=seed)
    output = RowsOutput(voice="Ada", spans=SPANS)
    producer.emitter.add(request_id, output, made.prompt, set(), POSITIONS)
    return made


def with_text(payload: RowsPayload, next_row: int) -> tuple[RowsFeed, int]:
    """The feed that the server makes of a payload: text of id 0 up to its rows, and between them."""
    text = []
    for segment in payload.segments:
        if segment.first_position > next_row:
            text.append(TextSegment(next_row, (0,) * (segment.first_position - next_row)))
        next_row = segment.first_position + segment.num_rows
    return RowsFeed(payload, text=tuple(text)), next_row


@pytest.mark.parametrize("counts", [[12], [3, 9], [4, 4, 4], [5, 5, 2], [1] * 12, [10, 2]])
def test_the_rows_of_media_arrive_at_the_consumers_positions(
    producer: tuple[Producer, SlabQueue | None], counts: list[int]
) -> None:
    made, queue = producer
    spoken = sending(made)
    store, position, next_row = RowStore(() if queue is None else (queue,), 0), 0, 0
    store.use_table(torch.zeros(1, WIDTH))
    store.announce("r", RowsInput(num_replaced=0))
    for count in [*counts, 1, 1]:
        payloads = made.step([(spoken, position, count)])
        if payloads:
            feed, next_row = with_text(payloads["r"], next_row)
            store.add("r", feed)
        position += count
    assert next_row == 7
    rows = stored_rows(store, "r", 0, 7)
    for target in range(7):
        source = MEDIA.get(target)
        expected = torch.zeros(WIDTH) if source is None else (spoken.hidden + spoken.embeds)[source]
        assert torch.equal(rows[target], expected)
    given = store.get("r").prompt_positions(10)  # type: ignore[union-attr]
    assert given is not None
    assert given.tolist() == [[*POSITIONS[0].tolist(), 8.5]] * 3
    assert queue is None or queue.num_in_use() == 0


def test_a_payload_of_media_has_neither_boundary_nor_tail(
    producer: tuple[Producer, SlabQueue | None],
) -> None:
    made, _ = producer
    payload = made.step([(sending(made), 0, LENGTH)])["r"]
    assert [(s.first_position, s.num_rows) for s in payload.segments] == [(1, 3), (6, 1)]
    assert payload.tail is None
    assert payload.num_generated_rows == 0


def test_steps_without_media_send_nothing_and_preempted_ones_send_nothing_again(
    producer: tuple[Producer, SlabQueue | None],
) -> None:
    made, queue = producer
    spoken = sending(made)
    assert made.step([(spoken, 0, 3)]) == {}
    (first,) = made.step([(spoken, 3, 2)]).values()
    if queue is not None:
        assert isinstance(first.block, SharedBlock)
        queue.finish_all(first.block)
    assert made.step([(spoken, 0, 5)]) == {}  # preempted
    (rest,) = made.step([(spoken, 5, 7)]).values()
    assert [(s.first_position, s.num_rows) for s in rest.segments] == [(3, 1), (6, 1)]
    for position in range(LENGTH, LENGTH + 3):
        assert made.step([(spoken, position, 1)]) == {}
    assert queue is None or queue.num_in_use() == 1


def test_a_request_without_rows_left_may_share_a_step_with_one_that_sends(
    producer: tuple[Producer, SlabQueue | None],
) -> None:
    made, _ = producer
    old, new = sending(made, "old"), sending(made, "new", seed=1)
    made.step([(old, 0, LENGTH)])
    for position in range(LENGTH, LENGTH + 3):  # steps in which the runner does not ask for rows
        assert position >= last_sent(RowsOutput("Ada", spans=SPANS))
    payloads = made.step([(old, LENGTH + 3, 1), (new, 0, LENGTH)])
    assert set(payloads) == {"new"}
    assert payloads["new"].width == WIDTH


def test_the_last_row_that_is_sent_is_that_of_the_last_media() -> None:
    assert last_sent(RowsOutput("Ada", spans=SPANS)) == 11
    assert last_sent(RowsOutput("Ada", spans=SPANS[:1])) == 0
    assert last_sent(RowsOutput("Ada")) == float("inf")


# -- positions, as the reference computes them for the talker's own prompt

IM_START, TEXT, PAD, AUDIO, IMAGE, VIDEO = 1, 2, 3, 11, 12, 13
AUDIO_START, VISION_START, MEDIA_END = 21, 22, 23
SECOND_PER_GRID = 2 / 1.8


class Talker(Qwen3OmniMoeTalkerForConditionalGeneration):
    """Its positions only, which need no weights."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = Qwen3OmniMoeTalkerConfig(
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=AUDIO,
            vision_start_token_id=VISION_START,
            audio_start_token_id=AUDIO_START,
            position_id_per_seconds=13,
            spatial_merge_size=2,
        )
        # The talker's config lacks it, but `get_rope_index` reads it.
        self.config.audio_config = type("AudioConfig", (), {"n_window": 50})
        self.spatial_merge_size = 2


class Thinker(MediaPositions):
    config = SimpleNamespace(position_id_per_seconds=13, vision_config=SimpleNamespace(spatial_merge_size=2))


class Chat:
    """A prompt with the sizes of its media."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.images: list[list[int]] = []
        self.videos: list[list[int]] = []
        self.audios: list[int] = []
        self.features: list[MultiModalFeatureSpec] = []

    def _add(self, modality: str, start: int, token: int, count: int, **sizes: Any) -> "Chat":
        place = PlaceholderRange(offset=len(self.ids) + 1, length=count)
        item = {name: SimpleNamespace(data=torch.as_tensor(value)) for name, value in sizes.items()}
        self.features.append(MultiModalFeatureSpec(item, modality, str(place.offset), place))  # type: ignore[arg-type]
        self.ids += [start, *[token] * count, MEDIA_END]
        return self

    def text(self, count: int) -> "Chat":
        self.ids += [TEXT] * count
        return self

    def audio(self, num_frames: int) -> "Chat":
        count = int(_get_feat_extract_output_lengths(torch.tensor(num_frames)))
        self.audios.append(num_frames)
        return self._add("audio", AUDIO_START, AUDIO, count)

    def image(self, height: int, width: int) -> "Chat":
        self.images.append([1, height, width])
        return self._add("image", VISION_START, IMAGE, height * width // 4, image_grid_thw=self.images[-1])

    def video(self, grids: int, height: int, width: int) -> "Chat":
        self.videos.append(grid := [grids, height, width])
        sizes = {"video_grid_thw": grid, SECONDS_PER_GRID: torch.tensor(SECOND_PER_GRID, dtype=torch.float64)}
        return self._add("video", VISION_START, VIDEO, grids * height * width // 4, **sizes)

    def turn(self) -> "Chat":
        self.ids.append(IM_START)
        return self

    def positions(self, ids: list[int], num_skipped: dict[str, int]) -> torch.Tensor:
        """The reference's positions of `ids`, which lack the first `num_skipped` media of each kind."""
        images = self.images[num_skipped.get("image", 0) :]
        videos = self.videos[num_skipped.get("video", 0) :]
        audios = self.audios[num_skipped.get("audio", 0) :]
        positions, _ = Talker().get_rope_index(
            torch.tensor([ids]),
            torch.tensor(images) if images else None,
            torch.tensor(videos) if videos else None,
            torch.ones(1, len(ids), dtype=torch.long),
            False,
            torch.tensor(audios) if audios else None,
            torch.full((len(videos),), SECOND_PER_GRID),
        )
        return positions[:, 0]


def spans_of(ids: list[int], turns: list[tuple[int, int]]) -> tuple[SourceSpan, ...]:
    """What the target has of the source: these turns."""
    spans, target = [], 0
    for first, end in turns:
        at = first
        while at < end:
            is_media = ids[at] in (AUDIO, IMAGE, VIDEO)
            behind = at
            while behind < end and (ids[behind] in (AUDIO, IMAGE, VIDEO)) == is_media:
                behind += 1
            spans.append(SourceSpan(at, target, behind - at, has_rows=is_media))
            target += behind - at
            at = behind
    return tuple(spans)


def chats() -> dict[str, tuple[Chat, list[int]]]:
    """Each with the numbers of the turns that the talker sees."""
    return {
        "text": (Chat().turn().text(5).turn().text(9).turn().text(2), [1]),
        "audio": (Chat().turn().text(5).turn().text(3).audio(137).text(4).turn().text(2), [1]),
        "image": (Chat().turn().text(5).turn().text(3).image(6, 10).text(4).turn().text(2), [1]),
        "video": (Chat().turn().text(5).turn().text(1).video(3, 4, 6).text(4).turn().text(2), [1]),
        "all in one turn": (
            Chat().turn().text(2).turn().audio(90).image(4, 8).text(1).video(2, 8, 4).text(6).turn().text(2),
            [1],
        ),
        "several turns": (
            Chat().turn().text(4).turn().image(12, 4).text(3).turn().text(8).turn().text(2).audio(301)
            .turn().text(5).turn().video(4, 4, 4).text(1).turn().text(2),
            [1, 3, 5],
        ),
        "turns next to each other": (
            Chat().turn().text(4).turn().image(12, 4).text(3).turn().image(4, 4).turn().text(2),
            [1, 2],
        ),
        "media of other turns": (
            Chat().turn().image(20, 4).turn().image(4, 12).text(3).turn().text(2),
            [1],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(chats()))
def test_positions_are_those_of_the_consumers_own_prompt(name: str) -> None:
    chat, wanted = chats()[name]
    starts = [index for index, token in enumerate(chat.ids) if token == IM_START]
    turns = list(zip(starts, [*starts[1:], len(chat.ids)], strict=True))
    spans = spans_of(chat.ids, [turns[number] for number in wanted])
    target = [chat.ids[p] for number in wanted for p in range(*turns[number])]
    length, media = consumer_prompt(len(chat.ids), chat.features, spans)
    assert length == len(target)
    positions, _ = Thinker().get_mrope_input_positions([TEXT] * (length + 9), media)
    skipped = {"image": 1} if name == "media of other turns" else {}
    assert torch.equal(unpacked(positions), chat.positions([*target, *[PAD] * 9], skipped))


def test_a_consumer_without_spans_has_the_producers_prompt() -> None:
    chat = Chat().text(3).image(4, 4).text(2)
    assert consumer_prompt(len(chat.ids), chat.features, None) == (len(chat.ids), chat.features)


def test_media_move_with_their_span_and_text_may_precede_it() -> None:
    chat = Chat().text(3).image(4, 4).text(2)
    spans = (SourceSpan(4, 7, 4, has_rows=True),)
    length, (feature,) = consumer_prompt(len(chat.ids), chat.features, spans)
    assert (length, feature.mm_position.offset, feature.mm_position.length) == (11, 7, 4)
