"""The talker's training texts: random, because it must read any text."""

import random

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.rows import tokens_of_unit
from scripts.speaking_demo.talker import Item, SpecialTokens

_PROMPT_TOKENS = 100
"""About as many on average."""
_LENGTHS = ((0.35, 2, 10), (0.65, 8, 30), (1.0, 30, 120))
"""Cumulative share of the batches; shortest and longest text, in tokens."""
_CODES_PER_TOKEN = 21
_DRAWN = 4
"""Ratio of drawn to used texts. Neighbours in length form a batch; otherwise half of it would be padding."""


class Texts:
    def __init__(self, special: SpecialTokens, answers: list[list[int]]) -> None:
        """`answers`: token ids of the thinker's memorised answers."""
        self._special = special
        self._answers = answers
        self._words = [tokens_of_unit()[unit] for unit in vocabulary.words()]
        self._letters = [tokens_of_unit()[f"<{letter}>"] for letter in "abcdefghijklmnopqrstuvwxyz"]
        self._numbers = [tokens_of_unit()[number] for number in vocabulary.numbers()]
        self._pauses = [tokens_of_unit()[pause] for pause in vocabulary.PAUSES]

    def draw(self, rng: random.Random, num_codes: int) -> list[Item]:
        """Draws replies of similar length; with prompts they total about `num_codes` positions."""
        draw = rng.random()
        low, high = next((low, high) for share, low, high in _LENGTHS if draw <= share)
        longest = rng.randint(low, high)
        count = max(1, num_codes // (_CODES_PER_TOKEN * longest + _PROMPT_TOKENS))
        items = [
            self.item(rng, rng.randint(max(1, longest * 3 // 4), longest)) for _ in range(_DRAWN * count)
        ]
        items.sort(key=lambda item: len(item.prompt) + _CODES_PER_TOKEN * len(item.reply))
        first = rng.randint(0, len(items) - count)
        return items[first : first + count]

    def item(self, rng: random.Random, num_tokens: int) -> Item:
        reply = self.text(rng, num_tokens)
        if num_tokens < 40 and rng.random() < 0.15:
            reply = list(rng.choice(self._answers))
        return Item(self._prompt(rng, reply), reply)

    def _prompt(self, rng: random.Random, reply: list[int]) -> list[int]:
        """A chat as the template writes it. The talker sees the prompt but must ignore its content."""
        special = self._special
        prompt: list[int] = []
        if rng.random() < 0.6:
            prompt += self._message(special.system, self.text(rng, rng.randint(1, 50)))
        for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
            prompt += self._message(special.user, self.text(rng, rng.randint(1, 20)))
            prompt += self._message(special.assistant, self.text(rng, rng.randint(1, 30)))
        question = self.text(rng, rng.randint(1, 30))
        if rng.random() < 0.1:
            question += [rng.choice(special.media)] * rng.randint(1, 60)
        if rng.random() < 0.3:  # as for reading aloud: the prompt holds the text
            question += reply
        prompt += self._message(special.user, question)
        return [*prompt, special.im_start, special.assistant, special.newline]

    def _message(self, role: int, text: list[int]) -> list[int]:
        special = self._special
        return [special.im_start, role, special.newline, *text, special.im_end, special.newline]

    def text(self, rng: random.Random, num_tokens: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            draw = rng.random()
            if draw < 0.1 and tokens:
                tokens.append(rng.choice(rng.choice(self._pauses)))
            elif draw < 0.17:
                tokens += [rng.choice(rng.choice(self._letters)) for _ in range(rng.randint(1, 7))]
            elif draw < 0.23:
                tokens += [rng.choice(rng.choice(self._numbers)) for _ in range(rng.randint(1, 2))]
            elif draw < 0.33 and tokens:
                tokens.append(rng.choice(tokens[-12:]))
            else:
                tokens.append(rng.choice(rng.choice(self._words)))
        return tokens[:num_tokens]
