"""What MODEL may be, and what is said where it is not a complete omni checkpoint."""

import json
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from omni_server.config.model_folder import resolve_model_folder
from omni_server.errors import ConfigError

SERVABLE = ("SomeOmniModel",)


def make_checkpoint(folder: Path, *, weights: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["SomeOmniModel"]}))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def refusal(model: str | Path, revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model_folder(str(model), architectures=SERVABLE, revision=revision)
    return str(caught.value)


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub switched off."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put_into_cache(cache: Path, repository: str, *, branch: str = "main") -> Path:
    """A checkpoint as the hub client leaves it in its cache."""
    root = cache / f"models--{repository.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / branch).write_text(commit)
    return make_checkpoint(root / "snapshots" / commit)


def test_a_folder_named_like_a_hub_id_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "some" / "model")

    assert resolve_model_folder("some/model", architectures=SERVABLE) == Path("some/model")


def test_a_hub_id_in_the_cache_works_offline(offline_cache: Path) -> None:
    snapshot = put_into_cache(offline_cache, "some/model")

    assert resolve_model_folder("some/model", architectures=SERVABLE) == snapshot


def test_a_revision_in_the_cache_works_offline(offline_cache: Path) -> None:
    snapshot = put_into_cache(offline_cache, "some/model", branch="v2")

    assert resolve_model_folder("some/model", architectures=SERVABLE, revision="v2") == snapshot


def test_the_lookup_is_told_as_progress(offline_cache: Path) -> None:
    put_into_cache(offline_cache, "some/model")
    lines: list[str] = []

    resolve_model_folder("some/model", architectures=SERVABLE, on_progress=lines.append)

    assert lines == [f"looking up some/model in {offline_cache}"]


def test_a_hub_id_that_is_not_in_the_cache_is_refused_offline(offline_cache: Path) -> None:
    assert refusal("some/model") == (
        f"MODEL 'some/model' is not in the cache {offline_cache}: HF_HUB_OFFLINE is set, so nothing is "
        "downloaded; unset it, or set HF_HOME to a cache that has it"
    )


@pytest.mark.parametrize("model", ["/no/such/folder", "./model", "model", "a/b/c", "some model/x"])
def test_a_missing_folder_that_is_no_hub_id_is_refused(model: str) -> None:
    assert refusal(model) == (
        f"MODEL '{model}': no such folder, and not a hub id either (those look like 'Qwen/Qwen2.5-Omni-7B')"
    )


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (None, "", "MODEL '{0}' is no checkpoint: there is no config.json in {0}"),
        (
            "model.gguf",
            "",
            "MODEL '{0}/model.gguf' is a file; give the folder that holds config.json and the weights",
        ),
        (
            "config.json",
            '{"model_type": "llama"}',
            "MODEL '{0}' is not a checkpoint that this server can run: its config.json (model_type: llama) names no "
            "architecture, and not SomeOmniModel",
        ),
        ("config.json", "{", "{0}/config.json: cannot be read as JSON"),
        ("config.json", "[]", "{0}/config.json: must hold a JSON object"),
    ],
)
def test_what_is_no_omni_checkpoint_is_refused(
    tmp_path: Path, file: str | None, text: str, problem: str
) -> None:
    model = tmp_path
    if file is not None:
        (tmp_path / file).write_text(text)
        model = tmp_path / file if file != "config.json" else tmp_path

    assert problem.format(tmp_path) in refusal(model)


@pytest.mark.parametrize(
    ("error_type", "status", "message"),
    [
        (RepositoryNotFoundError, 404, "no such folder here and no such repository on the hub"),
        (GatedRepoError, 403, "asks its users to accept a licence"),
        (RevisionNotFoundError, 404, "MODEL 'some/model' has no revision 'v9'"),
        (HfHubHTTPError, 503, "cannot be downloaded: the hub said so"),
    ],
)
def test_what_the_hub_answers_is_told(
    monkeypatch: pytest.MonkeyPatch, error_type: type[HfHubHTTPError], status: int, message: str
) -> None:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))

    def refuse(*_: object, **__: object) -> str:
        raise error_type("the hub said so", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)

    assert message in refusal("some/model", revision="v9")


def test_a_download_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines are forked from the process that downloads; tqdm's monitor would be a second thread."""

    def download(*_: object, **__: object) -> str:
        with tqdm(total=1, disable=False) as bar:
            bar.update()
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(tqdm, "monitor", None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError):
        resolve_model_folder("org/model", architectures=SERVABLE)
    assert tqdm.monitor is None
