"""What a stage asks of its model after loading: the hidden states of one layer, and the rows of text ids."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_server.protocol.rows import RowsFeed, RowsInput, RowsOutput, SourceSpan, TextSegment
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime import ar_runner_base
from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin
from stages.runtime.stage_step import StageStep, attach_step
from tests.unit.stages import test_ar_runner_v1 as v1
from tests.unit.stages import test_ar_runner_v2 as v2
from tests.unit.stages.runners import LOOKING_UP, SENDING_LAYER, WIDTH, LayeredModel, embedded


class Model(LayeredModel):
    embed_input_ids = staticmethod(embedded)

    @staticmethod
    def get_mrope_input_positions(tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(tokens)).expand(3, -1), 0


class TableModel(Model):
    def row_table(self) -> torch.Tensor:
        """Id i has a row of -i."""
        return -embedded(torch.arange(10))


class V1Base(v1.BaseRunner):
    use_aux_hidden_state_outputs = False
    model: Any

    def get_model(self) -> Any:
        return self.model

    def compute(self, scheduler_output: Any, step: int) -> None:
        super().compute(scheduler_output, step)
        state = self.execute_model_state
        state.aux_hidden_states = [state.hidden_states + 0.5]


class V2Base(v2.BaseRunner):
    use_aux_hidden_state_outputs = False
    the_model: Any

    def load_model(self) -> None:
        super().load_model()
        self.model = self.the_model

    def execute_model(self, scheduler_output: Any, batch: Any = None) -> None:
        super().execute_model(scheduler_output, batch)
        if batch is not None:
            state = self.execute_model_state
            state.aux_hidden_states = [state.hidden_states + 0.5]


def v1_runner(
    config: StageRuntimeConfig, model: Any, monkeypatch: pytest.MonkeyPatch, **attributes: Any
) -> Any:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    made = type("Runner", (ARModelRunnerV1Mixin, V1Base), attributes | {"model": model})(
        SimpleNamespace(additional_config=config, model_config=SimpleNamespace(uses_mrope=False)),
        torch.device("cpu"),
    )
    made.load_model()
    return made


def v2_runner(config: StageRuntimeConfig, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(v2, "BaseRunner", V2Base)
    return v2.runner(config, monkeypatch, the_model=model)


def test_the_v1_runner_sends_the_hidden_states_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    made = v1_runner(SENDING_LAYER, model, monkeypatch)
    assert model.layers == (3,)
    assert made.use_aux_hidden_state_outputs
    made.compute(v1.step(new=True), 1)
    message = v1.finished_output(made.sample_tokens(None)).pooler_output[0]
    rows = v1._rows(v1.decode_payload(bytes(message.numpy())))
    assert rows[:3].unique().tolist() == [10.5]


def test_the_v2_runner_sends_the_hidden_states_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    made = v2_runner(SENDING_LAYER, model, monkeypatch)
    assert model.layers == (3,)
    assert made.use_aux_hidden_state_outputs
    made.execute_model(v2.step(new=(v2.request("a", [1, 2], v2.SENDER),)), v2.batch(a=(0, [1, 2])))
    message = made.sample_tokens(None).get_output().pooler_output[0]
    assert v2.rows(message)[:2] == [10.5, 10.5]


def test_only_steps_with_media_send_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = v2_runner(SENDING_LAYER, Model(), monkeypatch)
    spans = SourceSpan(0, 0, 1, has_rows=False), SourceSpan(1, 1, 1, has_rows=True)
    sender = v2.request("a", [1, 2, 3], RowsOutput("v", spans=spans))
    made.execute_model(v2.step(new=(sender,)), v2.batch(a=(0, [1, 2, 3])))
    message = made.sample_tokens(None).get_output().pooler_output[0]
    assert v2.rows(message) == [10.5]
    made.execute_model(v2.step(), v2.batch(a=(3, [4])))
    assert made.sample_tokens(None) is made.output, "the step is left as it is"


def test_a_model_that_does_not_name_its_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="SimpleNamespace does not return the hidden states of a layer"):
        v1_runner(SENDING_LAYER, SimpleNamespace(embed_input_ids=embedded), monkeypatch)


def test_drafts_from_hidden_states_are_refused_where_a_layers_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="cannot draft from hidden states"):
        v1_runner(SENDING_LAYER, Model(), monkeypatch, use_aux_hidden_state_outputs=True)


def test_text_is_laid_over_with_the_rows_of_the_models_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = v2_runner(LOOKING_UP, TableModel(), monkeypatch)
    new = v2.step(new=(v2.request("a", [1, 2, 3], RowsInput(num_replaced=2)),))
    feed = RowsFeed(text=(TextSegment(0, (5, 6)), TextSegment(2, (7,))), final_length=3, tail_ids=(8,))
    attach_step(new, StageStep(feeds=(("a", feed),)))
    made.execute_model(new, v2.batch(a=(0, [1, 2, 3])))
    assert made.model_input[:3, 0].tolist() == [-5.0, -6.0, 3.0 - 7.0]
    assert made.row_overlay.dtype == torch.float32
    assert made.model_input.shape[1] == WIDTH


def test_a_model_without_a_table_is_refused_where_text_arrives_as_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TypeError, match="Model has no table of rows for text ids"):
        v2_runner(LOOKING_UP, Model(), monkeypatch)
