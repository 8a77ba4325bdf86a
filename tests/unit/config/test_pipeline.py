"""Which pipelines a family may declare, and how families are found."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from omni_server.config import pipeline
from omni_server.config.pipeline import (
    EdgeSpec,
    Embeddings,
    Pipeline,
    StageSpec,
    Text,
    TokenFrames,
    find_family,
)
from omni_server.errors import ConfigError
from omni_server.family import families_of_this_process, load_family, servable_architectures

TEXT, AR = StageSpec("ar", output="text"), StageSpec("ar")
READER = StageSpec("ar", reads_text=True)
AUDIO = StageSpec("diffusion", output="audio")
IMAGE = StageSpec("diffusion", output="image")


def rows(source: str, target: str) -> EdgeSpec:
    return EdgeSpec(source, target, Embeddings(), "package:Rows")


def text(source: str, target: str) -> EdgeSpec:
    return EdgeSpec(source, target, Text(), "package:Filter")


def frames(source: str, target: str) -> EdgeSpec:
    return EdgeSpec(source, target, TokenFrames(4), "package:Windows")


@pytest.mark.parametrize(
    ("stages", "edges"),
    [
        ({"a": TEXT}, ()),
        ({"a": AR, "b": AUDIO}, (frames("a", "b"),)),
        ({"a": IMAGE}, ()),
        ({"a": TEXT, "b": AR, "c": AUDIO}, (rows("a", "b"), frames("b", "c"))),
        ({"a": TEXT, "b": READER, "c": AUDIO}, (text("a", "b"), frames("b", "c"))),
        ({"a": READER, "b": AUDIO}, (frames("a", "b"),)),
    ],
)
def test_what_the_server_can_run_is_accepted(
    stages: dict[str, StageSpec], edges: tuple[EdgeSpec, ...]
) -> None:
    outputs = [stage.output for stage in stages.values() if stage.output is not None]
    assert Pipeline(stages, edges).stages_for(outputs) == tuple(stages)


@pytest.mark.parametrize(
    ("stages", "edges", "message"),
    [
        ({}, (), "a pipeline has at least one stage"),
        ({"a": TEXT}, (rows("a", "b"),), "edge a -> b: there is no stage 'b'"),
        ({"a": TEXT, "b": IMAGE}, (), "a pipeline has one entry, not 2: a, b"),
        ({"a": TEXT, "b": AR, "c": AR}, (rows("b", "c"), rows("c", "b")), "stages in a circle: "),
        ({"a": AR, "b": AUDIO}, (frames("a", "b"), frames("a", "b")), "stage 'b' has 2 sources"),
        (
            {"a": TEXT, "b": AR, "c": AR, "d": AUDIO},
            (rows("a", "b"), rows("a", "c"), frames("b", "d")),
            "stage 'a' sends the same kind of payload to two stages",
        ),
        (
            {"a": AR, "b": AUDIO},
            (rows("a", "b"),),
            "edge a -> b: Embeddings flow from ar -> ar, not from ar -> dif",
        ),
        (
            {"a": AR, "b": AUDIO},
            (EdgeSpec("a", "b", "frames", "package:Windows"),),
            "edge a -> b: 'frames' is no payload",
        ),  # type: ignore[arg-type]
        ({"a": AR}, (), "stage 'a' leads to no output"),
        ({"a": StageSpec("ar", output="audio")}, (), "stage 'a': ar stages do not end in audio"),
        (
            {"a": TEXT, "b": AUDIO},
            (frames("a", "b"),),
            "stage 'a': a stage whose output is text sends text or embeddings",
        ),
        (
            {"a": TEXT, "b": AR, "c": AUDIO, "d": IMAGE},
            (rows("a", "b"), frames("a", "d"), frames("b", "c")),
            "stage 'a': a stage whose output is text sends text or embeddings",
        ),
        (
            {"a": TEXT, "b": AR, "c": AUDIO},
            (text("a", "b"), frames("b", "c")),
            "stage 'b': stages behind others read text if that is sent to them",
        ),
        (
            {"a": TEXT, "b": READER, "c": AUDIO},
            (rows("a", "b"), frames("b", "c")),
            "stage 'b': stages behind others read text if that is sent to them",
        ),
        ({"a": AUDIO}, (), "stage 'a': audio is not made of the prompt"),
        ({"a": AR, "b": IMAGE}, (frames("a", "b"),), "stage 'b': image is not made of frames"),
    ],
)
def test_what_the_server_cannot_run_is_refused_when_it_is_declared(
    stages: dict[str, StageSpec], edges: tuple[EdgeSpec, ...], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        Pipeline(stages, edges)


@pytest.mark.parametrize(
    ("num_codebooks", "num_predicted", "message"),
    [
        (0, 0, "frames have at least one codebook, not 0"),
        (1, 1, "num_predicted is 1, but "),
        (16, -1, "num_predicted is -1, but "),
        (
            16,
            14,
            "num_predicted is 14, but the codes of a frame are predicted from one sampled token: of 16 "
            "codebooks, 15 or none",
        ),
        (16, 16, "num_predicted is 16, but "),
    ],
)
def test_frames_that_no_stage_can_make_are_refused(
    num_codebooks: int, num_predicted: int, message: str
) -> None:
    with pytest.raises(ValueError, match="^" + message):
        TokenFrames(num_codebooks, num_predicted)


def test_codes_that_are_predicted_are_not_sampled() -> None:
    assert [TokenFrames().num_sampled, TokenFrames(4).num_sampled, TokenFrames(16, 15).num_sampled] == [
        1,
        4,
        1,
    ]


# -- families


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)
    find_family.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError|No module named"),
        ("raise RuntimeError('no license')", r"cannot import {0} \(RuntimeError: no license\)"),
        ("def (", r"cannot import {0} \(SyntaxError: "),
        ("", "{0} has no 'FAMILY'"),
        ("class FAMILY: pipeline = 5", "{0}:FAMILY declares no pipeline"),
        ("class FAMILY: pass", "{0}:FAMILY declares no pipeline"),
    ],
)
def test_a_family_that_cannot_be_used_is_refused_in_one_sentence(
    plugins: Path, source: str, message: str
) -> None:
    name = f"plugin_{abs(hash(source))}"
    (plugins / f"{name}.py").write_text(source)
    try:
        with pytest.raises(ValueError, match=message.format(name)):
            find_family(f"{name}:FAMILY")
    finally:
        sys.modules.pop(name, None)


def declare(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Installed packages declare these families, by name and place, and no others."""
    declared = [EntryPoint(name, value, pipeline.ENTRY_POINT_GROUP) for name, value in points]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == pipeline.ENTRY_POINT_GROUP
        return [point for point in declared if name in (None, point.name)]

    monkeypatch.setattr(pipeline, "entry_points", entry_points)
    find_family.cache_clear()


def test_two_families_of_one_name_are_refused_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qwen = ("qwen2_5_omni", "stages.qwen2_5_omni:FAMILY")
    declare(monkeypatch, ("one", "a:FAMILY"), qwen, ("one", "b:FAMILY"))
    with pytest.raises(
        ValueError, match="two packages declare a model family 'one', a:FAMILY and b:FAMILY: "
    ):
        find_family("one")
    assert find_family("qwen2_5_omni").pipeline.entry == "thinker"


def test_one_family_may_be_declared_twice_as_in_a_checkout_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare(monkeypatch, ("one", "stages.qwen2_5_omni:FAMILY"), ("one", "stages.qwen2_5_omni:FAMILY"))
    assert find_family("one") is find_family("stages.qwen2_5_omni:FAMILY")


def test_a_family_that_cannot_be_loaded_is_in_nobodys_way_who_does_not_ask_for_it(
    plugins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (plugins / "broken_plugin.py").write_text("raise RuntimeError('no license')")
    declare(monkeypatch, ("broken", "broken_plugin:FAMILY"), ("good", "stages.qwen2_5_omni:FAMILY"))
    good = load_family("good")

    assert servable_architectures() == good.architectures
    assert families_of_this_process() == [good]
    assert [record.getMessage() for record in caplog.records] == [
        "model_family 'broken': cannot import broken_plugin (RuntimeError: no license)"
    ] * 2

    monkeypatch.setenv(pipeline.MODEL_FAMILY_VARIABLE, "broken")
    with pytest.raises(ConfigError, match="no license"):
        families_of_this_process()
