"""`omni-server`: usage, exit codes, and `config show`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from omni_server import __version__
from omni_server.cli.main import main
from omni_server.config.load import find_shipped_config, load_stage_config, shipped_configs
from omni_server.config.stage_config import StageConfig


def run_and_exit(*arguments: str) -> int:
    """Exit code of a call that argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_exit("--version") == 0
    assert capsys.readouterr().out == f"omni-server {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["serve", "--help"], ["config", "--help"], ["config", "show", "-h"], ["check", "-h"]],
)
def test_every_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_exit(*arguments) == 0
    assert capsys.readouterr().out.startswith("usage: omni-server")


@pytest.mark.parametrize(
    "arguments", [[], ["server"], ["config"], ["config", "show"], ["serve", "one-model", "another"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert run_and_exit(*arguments) == 2


def test_a_flag_of_one_stage_is_refused_with_the_place_where_it_belongs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_and_exit("serve", "some/model", "--max-num-seqs=5") == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "omni-server serve: error: unrecognized argument --max-num-seqs=5: "
        "max_num_seqs belongs to a stage; set stages.<name>.max_num_seqs in the file that --stage-config names"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("serve a --prot 9000", "serve: error: unrecognized arguments: --prot 9000; did you mean --port?"),
        ("serve a --prot=9000", "serve: error: unrecognized arguments: --prot=9000; did you mean --port?"),
        (
            "check a --stage-confg b",
            "check: error: unrecognized arguments: --stage-confg b; did you mean --stage-config?",
        ),
        ("config show a --jsn", "config show: error: unrecognized arguments: --jsn; did you mean --json?"),
        ("serve a --zzz", "serve: error: unrecognized arguments: --zzz"),
        (
            "serve a --prot 1 --hots b",
            "serve: error: unrecognized arguments: --prot 1 --hots b; did you mean --port and --host?",
        ),
    ],
)
def test_a_misspelt_flag_is_told_in_one_line_with_the_flag_that_was_meant(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_exit(*arguments.split()) == 2

    complaint, help_command = capsys.readouterr().err.splitlines()
    assert complaint == f"omni-server {reason}"
    assert help_command.endswith("--help")


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_config_show_prints_a_config_that_means_the_same(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", name]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)

    assert StageConfig.model_validate(printed) == load_stage_config(find_shipped_config(name))


def test_config_show_fills_in_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "qwen2_5_omni", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)

    assert printed["stages"]["code2wav"]["solver"] == {
        "num_steps": 10,
        "guidance_scale": 0.5,
        "sway_coefficient": -1.0,
    }
    assert printed["edges"][0]["from"] == "thinker"


def test_a_mistake_in_a_config_exits_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        find_shipped_config("qwen2_5_omni").read_text().replace("max_model_len: 156", "max_model_lenn: 156")
    )

    lines = file.read_text().splitlines()
    stage = lines.index("  code2wav:") + 1
    (wrong,) = (number for number, line in enumerate(lines, 1) if line.startswith("    max_model_lenn:"))

    assert main(["config", "show", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"omni-server: error: {file}: line {stage}: stages.code2wav.max_model_len: missing",
        f"{file}: line {wrong}: stages.code2wav.max_model_lenn: unknown key; did you mean 'max_model_len'?",
    ]


def test_config_validate_says_what_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "qwen2_5_omni.demo-cpu"]) == 0
    assert capsys.readouterr().out == (
        f"{find_shipped_config('qwen2_5_omni.demo-cpu')} is valid: platform cpu, stages thinker (thinker), "
        "talker (talker), code2wav (code2wav)\n"
    )


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        ("serve", {"torch", "transformers", "vllm"}),
    ],
)
def test_help_imports_little(command: str, unwanted: set[str]) -> None:
    program = (
        "import sys\n"
        "from omni_server.cli.main import main\n"
        "try:\n"
        f"    main(['{command}', '--help'])\n"
        "except SystemExit:\n"
        f"    sys.stderr.write(str(sorted({unwanted} & sys.modules.keys())))\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert finished.stderr == "[]"
