"""Checks the grammars of structured outputs before an engine gets them.

A short grammar can take minutes or gigabytes: xgrammar tries every way to read each token of the vocabulary,
and repetitions such as `([^"]{1,5000}){1,5000}` multiply these ways. Nothing can interrupt it. So a process
with limits (`limited_process`) first does all that vLLM will do until the first token: its own checks, the
compilation, and the first mask. The process is forked from one that has the model's tokenizer, which is
itself forked from the fork server."""

import logging
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.system_utils import set_process_title
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key
from xgrammar import GrammarCompiler, TokenizerInfo

from omni_server.engine.fork_server import KILL_TIMEOUT_S, start_process
from omni_server.errors import InvalidRequestError
from omni_server.media.limited_process import Cancellation, Program, Reader, read_in_process
from omni_server.media.limited_program import DAMAGED, ReaderProcesses
from omni_server.media.process_places import ProcessPlaces

PROCESS_NAME = "GrammarCheck"
CPU_LIMIT_S = 5
"""The engine needs about as much again. With 151,000 tokens, 10 kB of an enumeration took 0.2 s, and 60 kB
1.6 s."""
NICENESS = 10
"""Gives a tenth of the engine's share of a contended core."""
NUM_PLACES = 4
TIMEOUT_S = 120.0
"""Also for the start of the program, and for a process that shares its core with engines."""
QUEUE_TIMEOUT_S = 30.0
MAX_MEMORY_BYTES = 2 << 30
_NUM_REMEMBERED = 128
"""Grammars that are not checked again. Clients send the same tools and schemas with each request."""
_EXAMPLES = (
    StructuredOutputsParams(regex="("),
    StructuredOutputsParams(grammar='start: "a"'),  # Lark
    StructuredOutputsParams(structural_tag='{"format": {"type": "any_text"}}'),
    StructuredOutputsParams(json='{"type": "object"}'),
)
"""Checked before processes are forked, which cannot open what vLLM imports when it is first needed."""
_OUT_OF_MEMORY = "std::bad_alloc"
"""xgrammar's words, in errors of its own and of vLLM."""
_SIZE = struct.Struct("=I")
_MAX_ANSWER_BYTES = 16 << 20


class _Answer(msgspec.Struct):
    checked: StructuredOutputsParams | None = None
    """As vLLM changes them; None if it refuses them."""
    message: str = ""
    cause: str = ""
    parameter: str | None = None


class GrammarCheck:
    """The checks of one engine's requests. Starts no process before the first one."""

    def __init__(self, config: Callable[[], VllmConfig]) -> None:
        """`config` is called in a thread, whenever the program is started."""
        self._program = Program(lambda control: _launch(config(), control))
        self._places = ProcessPlaces(
            NUM_PLACES, QUEUE_TIMEOUT_S, "The server is busy with the grammars of other requests."
        )
        self._remembered: dict[bytes, bytes] = {}
        """Answers, by a hash of the request; the least recently used comes first."""

    async def check(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        """Returns `wanted` as an engine expects it. Raises vLLM's error, `InvalidRequestError` if the grammar
        takes too much time or memory, or `OverloadedError`. A caller who is cancelled leaves no process."""
        try:
            request = msgspec.msgpack.encode(wanted)
        except UnicodeEncodeError as error:
            raise VLLMValidationError("The grammar is not valid Unicode.") from error
        key = sha256(request).digest()
        data = self._remembered.pop(key, b"") or await self._places.run(partial(self._ask, request))
        answer = msgspec.msgpack.decode(data, type=_Answer)
        if answer.checked is None:
            raise VLLMValidationError(answer.message, parameter=answer.parameter) from ValueError(
                answer.cause
            )
        self._remembered[key] = data
        if len(self._remembered) > _NUM_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return answer.checked

    def end(self) -> None:
        """Ends all processes. A later check starts them again."""
        self._program.end()

    def _ask(self, request: bytes, cancellation: Cancellation) -> bytes:
        reader = Reader(
            module=Path(__file__),
            arguments=(),
            reads="the grammar",
            max_memory_bytes=MAX_MEMORY_BYTES,
            max_cpu_s=CPU_LIMIT_S,
            timeout_s=TIMEOUT_S,
            refusals={DAMAGED: _too_much("memory")},
            too_slow=_too_much("time"),
        )
        with read_in_process(reader, request, cancellation, self._program) as output:
            (num_bytes,) = _SIZE.unpack(output.read(_SIZE.size))
            if num_bytes > _MAX_ANSWER_BYTES:
                raise output.damaged(f"an answer of {num_bytes} bytes")
            answer = output.read(num_bytes)
            output.check_nothing_left()
        return answer


def _too_much(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The grammar of the structured output or of the tools takes too much {what} to compile: avoid "
        "repetitions inside repetitions, and very long texts.",
        code="unsupported_value",
    )


def _launch(config: VllmConfig, control: socket.socket) -> Callable[[], int]:
    process = start_process(_serve, config, control)

    def end() -> int:
        process.kill()
        process.join(KILL_TIMEOUT_S)
        return -signal.SIGKILL if process.exitcode is None else process.exitcode

    return end


def _serve(config: VllmConfig, control: socket.socket) -> None:
    """The program that the processes are forked from."""
    set_process_title(PROCESS_NAME)
    os.nice(NICENESS)
    logging.disable()  # vLLM's log is standard output, which belongs to the answer
    tokenizer = cached_tokenizer_from_config(config.model_config)
    num_tokens = config.model_config.get_vocab_size()
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=num_tokens)
    # With vLLM's eight threads, xgrammar waits forever if there is no memory for the next one.
    tokens = TokenizerInfo.from_huggingface(tokenizer, vocab_size=num_tokens)
    backend.compiler = GrammarCompiler(tokens, max_threads=1)

    def check(wanted: StructuredOutputsParams) -> _Answer:
        params = SamplingParams(structured_outputs=wanted)
        try:
            params.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
            grammar = backend.compile_grammar(*get_structured_output_key(wanted))
            grammar.fill_bitmask(backend.allocate_token_bitmask(1), 0)
        except (VLLMClientError, RuntimeError) as error:
            message = str(error.args[0] if error.args else error)
            cause = str(error.__cause__ or "")
            if _OUT_OF_MEMORY in message + cause:
                raise MemoryError from error
            if not isinstance(error, VLLMClientError):  # of xgrammar: it would end the engine
                message, cause = "The grammar cannot be compiled.", message
            parameter = error.parameter if isinstance(error, VLLMValidationError) else None
            return _Answer(None, message, cause, parameter)
        return _Answer(wanted)

    def read(file: BinaryIO, output: BinaryIO, _: Sequence[str]) -> int:
        data = msgspec.msgpack.encode(
            check(msgspec.msgpack.decode(file.read(), type=StructuredOutputsParams))
        )
        output.write(_SIZE.pack(len(data)) + data)
        return 0

    for wanted in _EXAMPLES:
        check(wanted)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ReaderProcesses(control, read, base_bytes=pages * os.sysconf("SC_PAGESIZE")).serve()
