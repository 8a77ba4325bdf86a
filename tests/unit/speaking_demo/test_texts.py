"""What the thinker and the talker are trained on."""

import random
import re
from pathlib import Path

from tokenizers import Tokenizer

from scripts.speaking_demo import checkpoint, vocabulary
from scripts.speaking_demo.items import Texts
from scripts.speaking_demo.thinker import Chats
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds

Layout = tuple[Path, TokenIds]
TURN = re.compile(
    r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL
)


def bare(question: str) -> str:
    return question.rstrip("?.!").lower()


def test_no_question_with_an_answer_is_taught_as_unknown(layout: Layout, tokenizer: Tokenizer) -> None:
    known = {bare(question) for answer in vocabulary.answers() for question in answer.questions}
    chats = Chats(tokenizer, checkpoint.text_ids(layout[1]), random.Random(0))
    turns = [
        turn
        for _ in range(3000)
        for turn in TURN.findall(tokenizer.decode(chats.draw().ids, skip_special_tokens=False))
    ]
    unknown = {bare(question) for question, answer in turns if answer == vocabulary.UNKNOWN}
    assert len(unknown) > 500
    assert not unknown & known


def test_every_answer_is_taught(layout: Layout, tokenizer: Tokenizer) -> None:
    chats = Chats(tokenizer, checkpoint.text_ids(layout[1]), random.Random(0))
    taught = {
        tokenizer.decode(
            [token for token, counts in zip(example.ids, example.is_answer, strict=True) if counts]
        )
        for example in (chats.draw() for _ in range(3000))
    }
    said = {answer.text for answer in vocabulary.answers()}
    assert said | {vocabulary.UNKNOWN, vocabulary.HEARD, vocabulary.SEEN} <= taught


def test_texts_of_a_batch_are_about_as_long_as_each_other(layout: Layout, tokenizer: Tokenizer) -> None:
    answers = [tokenizer.encode(answer.text).ids for answer in vocabulary.answers()]
    texts = Texts(checkpoint.special_tokens(layout[1]), answers)
    rng = random.Random(0)
    batches = [texts.draw(rng, 6_000) for _ in range(100)]
    lengths = [[len(item.prompt) + 21 * len(item.reply) for item in batch] for batch in batches]
    used = sum(sum(batch) for batch in lengths)
    padded = sum(len(batch) * max(batch) for batch in lengths)
    assert used > 0.7 * padded
