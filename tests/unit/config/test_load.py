"""From a file to a config: every mistake is told with file, field and hint."""

import re
from pathlib import Path

import pytest
import yaml

from omni_server.config.load import find_shipped_config, find_stage_config, load_stage_config, shipped_configs
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from stages.diffusers.options import DiffusersStage
from tests.unit.config.deployment import deployment, deployment_with, deployment_without


def write(folder: Path, document: object) -> Path:
    path = folder / "stages.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return path


def refusal(folder: Path, document: object) -> str:
    """What the refusal says after the file's name and the line."""
    path = write(folder, document)
    with pytest.raises(ConfigError) as caught:
        load_stage_config(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return "\n".join(re.sub(r"^line \d+: ", "", line.removeprefix(f"{path}: ")) for line in lines)


def test_a_valid_file_gives_what_the_model_gives(tmp_path: Path) -> None:
    assert load_stage_config(write(tmp_path, deployment())) == StageConfig.model_validate(deployment())


@pytest.mark.parametrize("mps", ["auto", "on", "off"])
def test_mps_is_written_without_quotes(tmp_path: Path, mps: str) -> None:
    path = write(tmp_path, deployment())
    path.write_text(f"{path.read_text()}mps: {mps}\n")
    assert load_stage_config(path).mps == mps


@pytest.mark.parametrize("name", ["2024", "1_000", "on", "no", "null", "2026-11-27", "1e3"])
def test_a_name_that_looks_like_a_number_or_a_word_of_yaml_is_a_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "stages.yaml"
    loras = f"loras: {{{name}: style.safetensors}}"
    path.write_text(
        f"model_family: stages.diffusers:FAMILY\nplatform: cpu\n"
        f"stages: {{image: {{max_model_len: 4096, max_num_batched_tokens: 4096, {loras}}}}}\n"
    )
    (stage,) = load_stage_config(path).stages.values()
    assert isinstance(stage, DiffusersStage)
    assert stage.loras == {name: "style.safetensors"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modelfamily", "modelfamily: unknown key; did you mean 'model_family'?"),
        ("stages.talker.max_num_seq", "stages.talker.max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ("stages.code2wav.solvers", "stages.code2wav.solvers: unknown key; did you mean 'solver'?"),
        (
            "stages.talker.default_sampling.temprature",
            "stages.talker.default_sampling.temprature: unknown key; did you mean 'temperature'?",
        ),
        ("edges.0.queue.capcity", "edges[0].queue.capcity: unknown key; did you mean 'capacity'?"),
        ("edges.1.chunks.past_block", "edges[1].chunks.past_block: unknown key; did you mean 'past_blocks'?"),
        (
            "edges.0.queue.zzz",
            "edges[0].queue.zzz: unknown key; known are transport, capacity",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_likely_meaning(
    tmp_path: Path, path: str, message: str
) -> None:
    assert refusal(tmp_path, deployment_with(path, 1)) == message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "stages.talker.max_num_seqs",
            0,
            "stages.talker.max_num_seqs: must be greater than or equal to 1, not 0",
        ),
        ("stages.talker.max_num_seqs", 10**22, "stages.talker.max_num_seqs: must fit into 32 bits"),
        (
            "stages.talker.default_sampling.seed",
            -(2**63) - 1,
            "stages.talker.default_sampling.seed: must fit into 64 bits",
        ),
        (
            "stages.talker.devices",
            [0, "one"],
            "stages.talker.devices[1]: must be a valid integer, unable to parse string as an integer, not 'one'",
        ),
        ("platform", "gpu", "platform: must be 'cpu' or 'cuda', not 'gpu'; did you mean 'cpu'?"),
        (
            "stages.thinker.dtype",
            "bf16",
            "stages.thinker.dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', not 'bf16'; "
            "did you mean 'bfloat16'?",
        ),
        (
            "stages.Second",
            {"engine": "ar", "model_stage": "thinker", "max_model_len": 1},
            "stages.Second: a stage's name is lower-case letters, digits and underscores, and begins with a letter",
        ),
        ("stages.thinker.devices", [1, 1], "stages.thinker: devices names one device twice"),
        (
            "stages.thinker",
            5,
            "stages.thinker: must be a valid dictionary or object to extract fields from, not 5",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_is_possible(
    tmp_path: Path, path: str, value: object, message: str
) -> None:
    assert refusal(tmp_path, deployment_with(path, value)) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("platform", "platform: missing"),
        ("stages.talker.max_model_len", "stages.talker.max_model_len: missing"),
        ("edges.0.to", "edges[0].to: missing"),
    ],
)
def test_a_missing_key_is_named_with_its_path(tmp_path: Path, path: str, message: str) -> None:
    assert refusal(tmp_path, deployment_without(path)) == message


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    document = deployment_with("stages.talker.max_num_seq", 1)
    document["platform"] = "tpu"

    assert refusal(tmp_path, document) == (
        "platform: must be 'cpu' or 'cuda', not 'tpu'; did you mean 'cpu'?\n"
        "stages.talker.max_num_seq: unknown key; did you mean 'max_num_seqs'?"
    )


def test_problems_are_told_with_their_lines(tmp_path: Path) -> None:
    text = find_shipped_config("qwen2_5_omni.demo-cpu").read_text()
    text = text.replace("    max_num_seqs: 8\n", "    max_num_seq: 8\n", 1).replace(
        "new_blocks: [1, 1,", "new_blocks: [1, one,"
    )
    path = write(tmp_path, text)
    lines = text.splitlines()
    unknown = lines.index("    max_num_seq: 8") + 1
    (ramp,) = (number for number, line in enumerate(lines, 1) if "new_blocks: [1, one" in line)

    with pytest.raises(ConfigError) as caught:
        load_stage_config(path)

    assert [line.split(": ")[1:3] for line in str(caught.value).splitlines()] == [
        [f"line {unknown}", "stages.thinker.max_num_seq"],
        [f"line {ramp}", "edges[1].chunks.new_blocks[1]"],
    ]


def test_what_is_missing_is_told_with_the_line_of_what_lacks_it(tmp_path: Path) -> None:
    path = write(tmp_path, deployment_without("stages.talker.max_model_len"))
    line = path.read_text().splitlines().index("  talker:") + 1

    with pytest.raises(
        ConfigError, match=f"^{re.escape(str(path))}: line {line}: stages.talker.max_model_len: missing$"
    ):
        load_stage_config(path)


@pytest.mark.parametrize(
    ("path", "value", "key", "message"),
    [
        ("edges.1.to", "thinker", "edges:", "edges must be: thinker -> talker, talker -> code2wav; found: "),
        ("edges.1.to", "nobody", "  to: nobody", "edges[1].to is 'nobody', which is no stage; stages are "),
        ("edges.1.queue", {"capacity": 4}, "  queue:", "edges[1].queue.transport must be inline "),
        (
            "stages.talker.model_stage",
            "singer",
            "    model_stage: singer",
            "stages.talker.model_stage is 'singer'; ",
        ),
        ("stages.voice", {"max_model_len": 8}, "  voice:", "stages.voice.model_stage is 'voice'; "),
        ("model_family", "os:path", "model_family: os:path", "model_family 'os:path': "),
    ],
)
def test_a_problem_of_the_graph_is_told_with_its_line(
    tmp_path: Path, path: str, value: object, key: str, message: str
) -> None:
    file = write(tmp_path, deployment_with(path, value))
    line = len(lines := file.read_text().splitlines()) - lines[::-1].index(key)

    with pytest.raises(ConfigError) as caught:
        load_stage_config(file)

    assert str(caught.value).startswith(f"{file}: line {line}: {message}")


def test_a_syntax_error_is_told_with_line_and_column(tmp_path: Path) -> None:
    assert refusal(tmp_path, "platform: cpu\nstages: [1, 2\nedges: []\n") == (
        "line 3, column 6: while parsing a flow sequence; expected ',' or ']', but got ':'"
    )


def test_a_character_that_yaml_does_not_allow_is_told(tmp_path: Path) -> None:
    assert "not YAML: unacceptable character #x0007" in refusal(tmp_path, "platform: \a\n")


def test_a_tag_that_would_build_python_objects_is_refused(tmp_path: Path) -> None:
    assert "could not determine a constructor" in refusal(
        tmp_path, "platform: !!python/object:os.system {}\n"
    )


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    assert refusal(tmp_path, "platform: cpu\nedges: []\nplatform: cuda\n") == (
        "line 3, column 1: the key 'platform' stands here again; first on line 1"
    )


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("- a\n- b\n", "a list"), ("hello\n", "a str")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, found: str) -> None:
    assert refusal(tmp_path, text) == (
        f"a stage config is a mapping with the keys model_family, platform, stages and edges; found {found}"
    )


def test_a_missing_file_is_told_with_the_shipped_names(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"

    with pytest.raises(ConfigError) as caught:
        load_stage_config(path)

    assert str(caught.value) == (
        f"{path}: no such file; give a path or the name of a shipped config ({', '.join(shipped_configs())})"
    )


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_stage_config(tmp_path)


def test_a_binary_file_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"abc\xff\xfe")

    with pytest.raises(ConfigError, match=r"not a text file in UTF-8 \(invalid start byte at byte 3\)"):
        load_stage_config(path)


def test_a_shipped_config_is_found_with_and_without_suffix() -> None:
    assert find_shipped_config("qwen2_5_omni.yaml") == find_shipped_config("qwen2_5_omni")


def test_an_unknown_shipped_name_is_told_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen2_5_omni\.2gpu'\?"):
        find_shipped_config("qwen2_5_omni.2gpus")


def test_a_file_wins_over_a_shipped_config_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2_5_omni").write_text("platform: cpu\n")

    assert find_stage_config("qwen2_5_omni") == Path("qwen2_5_omni")
    assert find_stage_config("qwen2_5_omni.2gpu") == shipped_configs()["qwen2_5_omni.2gpu"]


# Found by changing the shipped files at random.


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2026-13-99", "timestamp"),
        ("2026-01-01 25:61:61", "timestamp"),
        ("2026-01-01T00:00:00+99:99", "timestamp"),
        ("!!timestamp soon", "timestamp"),
        ("9" * 5_000, "int"),
        ("!!int ''", "int"),
        ("!!float much", "float"),
        ("!!bool perhaps", "bool"),
    ],
)
def test_a_value_that_yaml_takes_for_another_kind_is_told_with_its_place(
    tmp_path: Path, value: str, kind: str
) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(f"platform: cpu\nrequest_timeout_s: {value}\n")
    with pytest.raises(ConfigError, match=f"line 2, column 20: a value that is no {kind}$"):
        load_stage_config(path)


@pytest.mark.parametrize("text", ["[" * 5_000, "a: " + "[" * 1_000 + "]" * 1_000, "{a: " * 5_000])
def test_a_file_that_nests_without_end_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_stage_config(path)


def bomb(first: str, of_next: str) -> str:
    """Thirty lines, each with nine aliases of the one before."""
    lines = [f"x0: &x0 {first}"]
    lines += [f"x{n}: &x{n} {of_next.replace('*', ', '.join([f'*x{n - 1}'] * 9))}" for n in range(1, 30)]
    return "\n".join(lines) + "\n"


def test_aliases_of_aliases_are_not_written_out(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(bomb("[x]", "[*]") + "platform: *x29\nmps: *x29\n")
    with pytest.raises(ConfigError) as caught:
        load_stage_config(path)
    assert "platform: must be 'cpu' or 'cuda', not [[" in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_a_merged_mapping_may_be_merged_into_another_with_keys_of_its_own(tmp_path: Path) -> None:
    """The keys that it has from another are not its own, whichever way it is come upon."""
    told = refusal(tmp_path, "a: &a {x: 1, y: 1}\nb: {inner: &b {<<: *a, x: 2}}\nc: {<<: *b, y: 3}\n")
    assert "unknown key" in told
    assert "stands here again" not in told


def test_merged_mappings_of_merged_mappings_are_not_written_out(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(bomb("{a: 1}", "{<<: [*]}"))  # 9 to the power of 29 times the same key
    with pytest.raises(ConfigError, match="x29: unknown key") as caught:
        load_stage_config(path)
    assert len(str(caught.value)) < 10_000
