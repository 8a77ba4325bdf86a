"""Tokens that a stage keeps back until a block of them is complete (`TOKENS_PER_OUTPUT_KEY`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats


@dataclass
class TokenBlock:
    """Tokens of one request that have not been sent to the server yet."""

    size: int
    num_sampled: int = 0
    unsent: list[int] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None

    def add(self, output: EngineCoreOutput) -> bool:
        """One step's output. True if it is to be sent: it then carries all that was kept back before."""
        self.unsent += output.new_token_ids
        self.num_sampled += len(output.new_token_ids)
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats
        num_sent = self.num_sampled - len(self.unsent)
        is_complete = num_sent // self.size < self.num_sampled // self.size
        if not is_complete and output.finish_reason is None and output.pooling_output is None:
            return False
        output.new_token_ids, self.unsent = self.unsent, []
        output.prefill_stats, self.prefill_stats = self.prefill_stats, None
        return True


def keep_back(outputs: dict[int, EngineCoreOutputs], blocks: Mapping[str, TokenBlock]) -> None:
    """Take out of `outputs` what need not be sent yet; a message that then says nothing is not sent at all."""
    for client, group in list(outputs.items()):
        group.outputs = [
            output for output in group.outputs if (block := blocks.get(output.request_id)) is None or block.add(output)
        ]
        if not group.outputs and group.scheduler_stats is None and not group.finished_requests:
            del outputs[client]
