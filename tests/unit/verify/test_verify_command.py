"""`omni-server verify`: wrong usage is told before anything starts."""

from pathlib import Path

import pytest

from omni_server.cli.main import main
from omni_server.family import ReferenceImplementation
from tests.toy_families import text_only
from tests.toy_families.toy import make_checkpoint

NO_MODEL = "no/such/model"


def test_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: omni-server verify")


@pytest.mark.parametrize(
    "arguments", [["m", "--demo"], ["m", "--timeout", "0"], ["m", "--quantization", "fp8"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2


def test_an_unknown_model_exits_with_2_and_leaves_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", NO_MODEL]) == 2
    assert NO_MODEL in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (None, "cannot be verified: it has no reference implementation"),
        (
            ReferenceImplementation("their.package:Reference", package="their-package"),
            "is compared with their-package, which is not installed: "
            "install it with 'pip install their-package'",
        ),
    ],
    ids=["none", "not installed"],
)
def test_a_family_without_a_reference_implementation_exits_with_2(
    reference: ReferenceImplementation | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_only.FAMILY, "reference", reference)
    config = tmp_path / "stages.yaml"
    config.write_text(
        "model_family: tests.toy_families.text_only:FAMILY\nplatform: cpu\nstages: {writer: {max_model_len: 64}}\n"
    )
    model = make_checkpoint(tmp_path / "toy", text_only.ARCHITECTURE)
    assert main(["verify", str(model), "--stage-config", str(config)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.md"))


def test_a_report_that_exists_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.md"
    file.touch()
    assert main(["verify", NO_MODEL, "--report", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"omni-server: error: --report {file} exists; give another name, or remove it\n"
    )
