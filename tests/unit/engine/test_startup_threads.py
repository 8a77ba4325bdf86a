"""Cores that engines get while they start."""

import os

import pytest
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, available_cpu_count

from omni_server.engine.startup_threads import shared_startup_threads


def test_engines_share_the_cores_and_vllm_may_reduce_them_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(OMP_NUM_THREADS_SET_BY_VLLM, raising=False)
    with shared_startup_threads(2):
        assert os.environ["OMP_NUM_THREADS"] == str(max(1, available_cpu_count() // 2))
        assert os.environ[OMP_NUM_THREADS_SET_BY_VLLM] == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    assert OMP_NUM_THREADS_SET_BY_VLLM not in os.environ


def test_what_the_operator_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv(OMP_NUM_THREADS_SET_BY_VLLM, raising=False)
    with shared_startup_threads(2):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert OMP_NUM_THREADS_SET_BY_VLLM not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "3"
