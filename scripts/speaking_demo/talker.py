"""The talker: rows of text in, codec ids out.

It learns a pointer and a table. The pointer derives the current text token from the last code's id and the
latest silent code, and finds that token's row. The table maps unit and last code to the next code.
Training-only losses direct the attention of two heads and make the first layer number the rows.

The model is a decoder in Qwen2's layout. Its tables over codec ids are sums of a sound part and a place part
(`codes.py`), which the export adds up.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from scripts.speaking_demo import codes
from scripts.speaking_demo.rows import STATE_GAIN, WIDTH, unit_of_token

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 128, 4, 4, 2, 64, 512
ROPE_THETA = 1e8
"""Large, so that most frequencies hardly turn within a text and attention can depend on content alone."""
NORM_EPS = 1e-6

NUM_PLACES = codes.TOKENS * codes.STEPS
INPUT_NOISE = 0.03
"""Chance that a training code has another sound, so that one wrong code does not derail the rest."""
END_SOUND, UNUSED_SOUND, BEGIN_SOUND, PAD_SOUND = range(codes.NUM_SOUNDS, codes.NUM_SOUNDS + 4)
END_PLACE, UNUSED_PLACE, NO_PLACE = range(NUM_PLACES, NUM_PLACES + 3)


def place_of(token: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return token % codes.TOKENS + codes.TOKENS * (step % codes.STEPS)


@dataclass(frozen=True)
class SpecialTokens:
    """Text ids of chats other than words."""

    im_start: int
    im_end: int
    newline: int
    system: int
    user: int
    assistant: int
    media: tuple[int, ...]
    """Placeholders, whose rows have no embedding."""
    speakers: tuple[int, ...]
    text_end: int
    text_pad: int


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    reply: list[int]
    """Text ids of the speech."""


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns output, queries and keys [batch, HEADS, length, HEAD_DIM]."""
        batch, length, _ = x.shape
        q = _rotated(self.q_proj(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2), turn)
        k = _rotated(self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2), turn)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        k = k.repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.repeat_interleave(HEADS // KV_HEADS, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1)), q, k


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)

    def forward(
        self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attended, q, k = self.self_attn(self.input_layernorm(x), turn)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), q, k


class Talker(nn.Module):
    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)
        self.sound = nn.Embedding(PAD_SOUND + 1, WIDTH)
        self.place = nn.Embedding(NO_PLACE + 1, WIDTH)
        self.sound_head = nn.Linear(HIDDEN, UNUSED_SOUND + 1, bias=False)
        self.place_head = nn.Linear(HIDDEN, UNUSED_PLACE + 1, bias=False)
        self.token_probe = nn.Linear(HIDDEN, codes.TOKENS)
        self.block_probe = nn.Linear(HIDDEN, codes.BLOCKS)
        for parameter in self.layers.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.7 * parameter.shape[1] ** -0.5)
        nn.init.normal_(self.proj.weight, std=0.7 * WIDTH**-0.5)
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns final states and each layer's output, queries and keys.

        `x` [batch, length, WIDTH]: rows plus codec embeddings.
        """
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        turn = (torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin())
        h = self.proj(x)
        outputs, attention = [], []
        for layer in self.layers:
            h, q, k = layer(h, turn)
            outputs.append(h)
            attention.append((q, k))
        return self.norm(h), outputs, attention


def _rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-b, a], -1) * turn[1]


@dataclass
class Batch:
    """Padded to the longest. Positions of prompt, speaker, begin and codes follow each other."""

    text: torch.Tensor
    """Text id at each position; int64 [batch, length]."""
    state: torch.Tensor
    """1 if a row contains the thinker's state, 0 for bare embeddings; float32 [batch, length]."""
    sound: torch.Tensor
    place: torch.Tensor
    """Codec input at each position; int64 [batch, length]. `uses_codec` marks positions with one."""
    uses_codec: torch.Tensor
    next_sound: torch.Tensor
    next_place: torch.Tensor
    """Prediction targets; -100 elsewhere."""
    start: torch.Tensor
    """Position of the latest first silent code; -1 where the input is no code."""
    row: torch.Tensor
    """Position of the row of the text token being spoken; -1 likewise."""
    number: torch.Tensor
    """Index of the text token whose row is here; -1 for none."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


class Speech:
    """Units as tensors, for making batches quickly."""

    def __init__(self, codebook: codes.Codebook, special: SpecialTokens) -> None:
        self.special = special
        self._units = [
            torch.tensor((0,) * codes.SILENT_STEPS + codebook.units[unit]) for unit in unit_of_token()
        ]

    def layout(self, reply: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sound, text token and step of each code, including the silent end; int64 [num_codes] each."""
        parts = [*(self._units[token] for token in reply), torch.zeros(codes.SILENT_STEPS, dtype=torch.long)]
        lengths = torch.tensor([len(part) for part in parts])
        token = torch.arange(len(parts)).repeat_interleave(lengths)
        step = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        sound = torch.where(step < codes.SILENT_STEPS, token // codes.TOKENS % codes.BLOCKS, torch.cat(parts))
        return sound, token, step

    def batch(self, items: list[Item], rng: random.Random) -> Batch:
        made = [self._one(item, rng) for item in items]
        length = max(len(m["text"]) for m in made)
        fill = {"next_sound": -100, "next_place": -100, "start": -1, "row": -1, "number": -1}
        return Batch(
            **{
                name: torch.stack(
                    [F.pad(m[name], (0, length - len(m[name])), value=fill.get(name, 0)) for m in made]
                )
                for name in made[0]
            }
        )

    def _one(self, item: Item, rng: random.Random) -> dict[str, torch.Tensor]:
        sound, token, step = self.layout(item.reply)
        place = place_of(token, step)
        num_prompt, num_codes, num_text = len(item.prompt), len(sound), len(item.reply)
        rest = [*item.reply[1:], self.special.text_end]
        rest += [self.special.text_pad] * (num_codes - len(rest))
        text = [*item.prompt, rng.choice(self.special.speakers), item.reply[0], *rest]
        length = num_prompt + 2 + num_codes
        state = torch.zeros(length)
        state[:num_prompt] = 1
        state[num_prompt + 1 : num_prompt + 1 + num_text] = 1

        def at_codes(values: torch.Tensor, before: list[int]) -> torch.Tensor:
            return torch.cat([torch.zeros(num_prompt, dtype=torch.long), torch.tensor(before), values])

        def predicted(values: torch.Tensor, last: int) -> torch.Tensor:
            return torch.cat([torch.full((num_prompt + 1,), -100), values, torch.tensor([last])])

        none = torch.full((num_prompt + 2,), -1)
        number = torch.full((length,), -1)
        number[num_prompt + 1 : num_prompt + 2 + num_text] = torch.arange(num_text + 1)
        first = num_prompt + 2
        return {
            "text": torch.tensor(text),
            "state": state,
            "sound": at_codes(sound, [PAD_SOUND, BEGIN_SOUND]),
            "place": at_codes(place, [NO_PLACE, NO_PLACE]),
            "uses_codec": torch.arange(length) >= num_prompt,
            "next_sound": predicted(sound, END_SOUND),
            "next_place": predicted(place, END_PLACE),
            "start": torch.cat([none, first + torch.arange(num_codes) - step]),
            "row": torch.cat([none, num_prompt + 1 + token]),
            "number": number,
        }


def inputs(talker: Talker, table: torch.Tensor, batch: Batch, noise: float = 0.0) -> torch.Tensor:
    """`table`: text embeddings [vocab_size, WIDTH]. `noise`: chance that a code's sound is another one."""
    rows = table[batch.text]
    rows = rows + STATE_GAIN * batch.state[..., None] * torch.randn_like(rows)
    sound = batch.sound
    if noise:
        other = torch.randint_like(sound, codes.NUM_SOUNDS)
        is_plain = (sound >= codes.BLOCKS) & (sound < codes.NUM_SOUNDS) & batch.uses_codec
        sound = torch.where(is_plain & (torch.rand(sound.shape, device=sound.device) < noise), other, sound)
    codec = talker.sound(sound) + talker.place(batch.place)
    return rows + codec * batch.uses_codec[..., None]


@dataclass
class Losses:
    sound: torch.Tensor
    place: torch.Tensor
    start: torch.Tensor
    row: torch.Tensor
    number: torch.Tensor

    def total(self) -> torch.Tensor:
        return self.sound + self.place + 0.3 * (self.start + self.row) + 0.2 * self.number


def losses(talker: Talker, table: torch.Tensor, batch: Batch, noise: float = 0.0) -> Losses:
    final, outputs, attention = talker(inputs(talker, table, batch, noise))
    wanted = batch.next_sound >= 0
    state = final[wanted]
    is_code = batch.start >= 0
    is_row = batch.number >= 0
    first_layer = outputs[0][is_row]
    number = batch.number[is_row]
    numbering = F.cross_entropy(talker.token_probe(first_layer), number % codes.TOKENS) + F.cross_entropy(
        talker.block_probe(first_layer), number // codes.TOKENS % codes.BLOCKS
    )
    return Losses(
        F.cross_entropy(talker.sound_head(state), batch.next_sound[wanted]),
        F.cross_entropy(talker.place_head(state), batch.next_place[wanted]),
        _looks_at(attention[0], 0, is_code, batch.start),
        (_looks_at(attention[1], 0, is_code, batch.row) + _looks_at(attention[1], 2, is_code, batch.row)) / 2,
        numbering,
    )


def _looks_at(
    attention: tuple[torch.Tensor, torch.Tensor], head: int, where: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Cross entropy of a head's attention from the positions `where` to the positions `target`."""
    q, k = attention[0][:, head], attention[1][:, head]
    length = q.shape[1]
    score = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    score = score.masked_fill(later, -torch.inf)
    return F.cross_entropy(score.flatten(0, 1), torch.where(where, target, -100).flatten())
