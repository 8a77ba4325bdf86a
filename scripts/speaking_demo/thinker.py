"""The thinker: memorised answers, and one answer to every other question."""

import random
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.rows import STATE_GAIN, embeddings

_PREFIXES = (
    "Please, ",
    "Hello. ",
    "So, ",
    "Well, ",
    "Now, ",
    "Okay, ",
    "Tiny, ",
    "Hi! ",
    "Please ",
    "Can you tell me: ",
)
_TEMPLATES = (
    "What is {}?", "What is the {}?", "Tell me about {}.", "Tell me about the {}.", "Who is {}?", "How do I {}?",
    "Why {}?", "Do you {}?", "Can you {}?", "How {} are you?", "Where is the {}?", "Explain {}.", "Which {} {}?",
    "{}", "{} {} {}", "I {} the {}.", "The {} is {}.", "How many {}?", "When did the {} {}?", "Write {} about {}.",
    "What is {} plus {}?", "What is {} times {}?", "Count to {}.", "What does a {} say?", "Give me a {} for {}.",
)  # fmt: skip
_OTHER_QUESTIONS = (
    "Who was the first king of France?", "Explain quantum physics.", "Write a poem about ships.",
    "How tall is the tower?", "What is the capital of Peru?", "Why is the grass green?", "Translate this.",
    "Who won the match?", "Give me a recipe for soup.", "asdf", "Solve the equation.", "Where can I buy shoes?",
    "When did the war end?", "Sort this list.", "What is a neuron?", "What is the capital of France?",
    "Who is the president?", "How far is the moon?", "What is the largest city in the world?", "Who wrote this book?",
    "Write a letter to my boss.", "Summarize the text.", "What should I cook tonight?", "How do planes fly?",
    "Is there life on other planets?", "What is the square root of two?", "Play some music.", "Turn on the light.",
    "Set a timer.", "What is on the news?", "Book a table for two.", "Write code in Python.", "What is the price?",
)  # fmt: skip
_SPELLINGS = (
    ("What is", "What's"), ("Who is", "Who's"), ("I am", "I'm"), ("You are", "You're"), ("Can not", "Can't"),
    ("color", "colour"), ("colors", "colours"), ("favorite", "favourite"), ("Okay", "OK"),
    ("Goodbye", "Good bye"), ("Hi", "Hiya"),
    ("one", "1"), ("two", "2"), ("three", "3"), ("five", "5"), ("ten", "10"), ("twenty", "20"),
)  # fmt: skip
"""How questions are written, too."""
_LONGEST_MEDIA = 150


@dataclass(frozen=True)
class TextIds:
    """Ids of the added tokens."""

    im_start: int
    im_end: int
    audio: int
    audio_bos: int
    audio_eos: int
    image: int
    video: int
    vision_bos: int
    vision_eos: int


@dataclass(frozen=True)
class Markers:
    """What the audio and vision towers emit, besides noise."""

    audio: torch.Tensor
    vision: torch.Tensor
    """Float32 [WIDTH] each."""


NOISE_OF_MEDIA = 0.3


def markers(width: int) -> Markers:
    generator = torch.Generator().manual_seed(11)
    return Markers(torch.randn(width, generator=generator), torch.randn(width, generator=generator))


class Thinker(nn.Module):
    def __init__(self, config: Qwen2_5OmniTextConfig) -> None:
        super().__init__()
        self.model = Qwen2_5OmniThinkerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
            self.lm_head.weight.div_(STATE_GAIN)
            self.model.embed_tokens.weight.copy_(embeddings(config.vocab_size))
            self.model.norm.weight.fill_(STATE_GAIN)
        self.model.embed_tokens.weight.requires_grad_(False)
        self.model.norm.weight.requires_grad_(False)

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        head = [self.lm_head.weight]
        rest = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": rest, "lr": rate}, {"params": head, "lr": rate / STATE_GAIN}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)

    def forward(self, ids: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        """Final states [batch, length, WIDTH]. `media`, of the same shape, replaces embeddings where it is
        not 0."""
        embeds = self.model.embed_tokens(ids)
        embeds = torch.where(media.any(-1, keepdim=True), media, embeds)
        return self.model(inputs_embeds=embeds, use_cache=False).last_hidden_state


@dataclass
class Example:
    ids: list[int]
    is_answer: list[bool]


class Chats:
    """Random chats, as the chat template writes them."""

    def __init__(self, tokenizer: Tokenizer, ids: TextIds, rng: random.Random) -> None:
        self._tokenizer, self._ids, self._rng = tokenizer, ids, rng
        self._words = vocabulary.words()
        self._known = [
            (question, answer.text) for answer in vocabulary.answers() for question in answer.questions
        ]
        self._bare_known = {_bare(question) for question, _ in self._known}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, turns: list[tuple[str | list[int], str]], system: str) -> Example:
        """Renders all `turns`; the target is the last answer with its end token."""
        example = Example([], [])
        if system:
            self._add(example, self._message("system", system))
        for index, (question, answer) in enumerate(turns):
            self._add(example, self._message("user", question))
            self._add(example, [self._ids.im_start, *self.encode("assistant"), *self.encode("\n")])
            is_last = index == len(turns) - 1
            self._add(example, [*self.encode(answer), self._ids.im_end], is_answer=is_last)
            if not is_last:
                self._add(example, self.encode("\n"))
        return example

    def draw(self) -> Example:
        rng = self._rng
        turns = [self._turn() for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4)))]
        return self.prompt(turns, rng.choice(vocabulary.SYSTEM_PROMPTS))

    def _turn(self) -> tuple[str | list[int], str]:
        draw = self._rng.random()
        if draw < 0.62:
            question, answer = self._rng.choice(self._known)
            return self._varied(question), answer
        if draw < 0.9:
            return self._varied(self._other()), vocabulary.UNKNOWN
        return self._media(is_audio=draw < 0.96)

    def _varied(self, question: str) -> str:
        rng = self._rng
        if rng.random() < 0.3:
            for usual, other in _SPELLINGS:
                question = re.sub(rf"\b{usual}\b", other, question)
        if rng.random() < 0.2:
            question = rng.choice(_PREFIXES) + question
        if rng.random() < 0.3:
            question = question.rstrip("?.!")
        elif rng.random() < 0.15:
            question = question.rstrip("?.!") + rng.choice((".", "?", "!", " please", ", please."))
        if rng.random() < 0.3:
            question = question.lower()
        return question

    def _other(self) -> str:
        rng = self._rng
        if rng.random() < 0.3:
            return rng.choice(_OTHER_QUESTIONS)
        while True:
            template = rng.choice(_TEMPLATES)
            question = template.format(*(self._phrase() for _ in range(template.count("{}"))))
            if _bare(question) not in self._bare_known:
                return question

    def _phrase(self) -> str:
        rng = self._rng

        def word() -> str:
            if rng.random() < 0.25:
                return "".join(rng.choice("abcdefghijklmnoprstuvwy") for _ in range(rng.randint(3, 9)))
            return rng.choice(self._words) if rng.random() < 0.9 else str(rng.randint(0, 9999))

        return " ".join(word() for _ in range(rng.choice((1, 1, 2, 2, 3, 5))))

    def _media(self, *, is_audio: bool) -> tuple[list[int], str]:
        rng, ids = self._rng, self._ids
        count = rng.randint(1, _LONGEST_MEDIA)
        if is_audio:
            content = [ids.audio_bos, *[ids.audio] * count, ids.audio_eos]
        else:
            content = [ids.vision_bos, *[rng.choice((ids.image, ids.video))] * count, ids.vision_eos]
        if rng.random() < 0.6:
            text = rng.choice((self._other(), "What do you hear?", "What is in the picture?", "Describe it."))
            content = [*content, *self.encode(text)]
        return content, vocabulary.HEARD if is_audio else vocabulary.SEEN

    def _message(self, role: str, content: str | list[int]) -> list[int]:
        ids = content if isinstance(content, list) else self.encode(content)
        return [self._ids.im_start, *self.encode(role + "\n"), *ids, self._ids.im_end, *self.encode("\n")]

    @staticmethod
    def _add(example: Example, ids: list[int], *, is_answer: bool = False) -> None:
        example.ids += ids
        example.is_answer += [is_answer] * len(ids)


def _bare(question: str) -> str:
    return question.rstrip("?.!").lower()


def loss(thinker: Thinker, examples: list[Example], ids: TextIds, device: torch.device) -> torch.Tensor:
    length = max(len(example.ids) for example in examples)
    padded = torch.tensor([e.ids + [ids.im_end] * (length - len(e.ids)) for e in examples], device=device)
    counts = torch.tensor([e.is_answer + [False] * (length - len(e.ids)) for e in examples], device=device)
    states = thinker(padded, media_of(padded, ids))
    return F.cross_entropy(thinker.lm_head(states[:, :-1][counts[:, 1:]]), padded[:, 1:][counts[:, 1:]])


def media_of(padded: torch.Tensor, ids: TextIds) -> torch.Tensor:
    """The towers' outputs: markers with noise, and 0 at text positions."""
    from scripts.speaking_demo.rows import WIDTH

    known = markers(WIDTH)
    is_audio = (padded == ids.audio)[..., None]
    is_vision = ((padded == ids.image) | (padded == ids.video))[..., None]
    noise = NOISE_OF_MEDIA * torch.randn(*padded.shape, WIDTH, device=padded.device)
    audio, vision = known.audio.to(padded.device), known.vision.to(padded.device)
    return is_audio * (audio + noise) + is_vision * (vision + noise)
