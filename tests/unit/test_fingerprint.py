"""`system_fingerprint`: the same for the same deployment, another for another."""

from pathlib import Path

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.omni import fingerprint_of


def test_it_names_the_checkpoint_and_the_stage_config(tmp_path: Path) -> None:
    config = load_stage_config(find_shipped_config("qwen2_5_omni"))
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint_of(tmp_path, config)
    assert fingerprint_of(tmp_path, config) == first
    assert fingerprint_of(tmp_path, config.model_copy(update={"request_timeout_s": 1.0})) != first
    (tmp_path / "config.json").write_text("{} ")
    assert fingerprint_of(tmp_path, config) != first
