"""First turns to train on: a user's chats, copying tasks made from texts, or none (self-prompting).

Law: a prompt is token ids that end where the assistant speaks (copying tasks a few words later);
the turns in between come from the target's own chat template. Evaluation sets are read by the same
rules but never mixed in. This module generates nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError

_USER, _ANSWER, _NEXT = "TANDEMKV-USER", "TANDEMKV-ANSWER", "TANDEMKV-NEXT"

COPY_TASKS = (
    "Repeat the following text word for word.\n\n{text}",
    "Copy this text exactly:\n\n{text}",
    "{text}\n\nWrite out the text above again, without changing anything.",
    "Please proofread the following text. Correct typing mistakes only, keep everything else.\n\n"
    "{text}",
    "{text}\n\nQuote the passage above, starting from the beginning.",
    "Here is a document.\n\n{text}\n\nPrint the document, then summarize it in one sentence.",
    "Continue this text after repeating it:\n\n{text}",
)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: ids up to where the assistant speaks (or goes on). pool: which pool it belongs to.

    max_answer: tokens of the answer, None: the pool's own limit. kind: what it is, for records.
    """

    tokens: list[int]
    pool: str = "chat"
    max_answer: int | None = None
    kind: str = "chat"


class TurnScripts(msgspec.Struct, frozen=True, kw_only=True):
    """The template's fixed tokens: before the first user turn, before an answer, before a question.

    before_answer and before_question leave out the end-of-turn token that the speaker emits.
    """

    opening: list[int]
    before_answer: list[int]
    before_question: list[int]


class ChatFormat:
    """A tokenizer with a chat template, as token ids."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("target: its tokenizer has no chat template, which training needs")
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Plain text as ids, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[dict[str, str]], answer_prefix: str = "") -> list[int]:
        """Messages, the assistant's header, and the first words of its answer if given."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return self.encode(text + answer_prefix)

    def scripts(self) -> TurnScripts:
        """The template's fixed parts, found by rendering a conversation of marked turns."""
        text = self._tokenizer.apply_chat_template(
            [
                {"role": "user", "content": _USER},
                {"role": "assistant", "content": _ANSWER},
                {"role": "user", "content": _NEXT},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        parts = re.split(f"{_USER}|{_ANSWER}|{_NEXT}", text)
        if len(parts) != 4:
            raise ConfigError("target: its chat template does not keep the turns as they are given")
        opening, _, before_question, before_answer = (self.encode(part) for part in parts)
        return TurnScripts(
            opening=opening,
            before_answer=self._after_eos(before_answer),
            before_question=self._after_eos(before_question),
        )

    def _after_eos(self, script: list[int]) -> list[int]:
        return script[1:] if script and script[0] in self._eos else script


def read_prompts(path: str, chat: ChatFormat) -> list[Prompt]:
    """The first turns of a JSONL file, one a line. Raises ConfigError with file and line."""
    return [
        _parse(row, f"{path}, line {number}", chat, Path(path).stem) for number, row in _rows(path)
    ]


def check_prompts(path: str) -> None:
    """Raise what `read_prompts` would, before there is a tokenizer."""
    for number, row in _rows(path):
        _checked(row, f"{path}, line {number}")


def _rows(path: str) -> Iterator[tuple[int, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error.msg})") from None


def _parse(row: Any, where: str, chat: ChatFormat, kind: str) -> Prompt:
    messages, prefix, limit = _checked(row, where)
    return Prompt(
        tokens=chat.prompt(messages, prefix),
        pool=str(row.get("pool", "chat")),
        max_answer=limit,
        kind=str(row.get("kind", kind)),
    )


def _checked(row: Any, where: str) -> tuple[list[dict[str, str]], str, int | None]:
    """Messages, answer prefix and longest answer of a line."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object")
    messages = _messages(row, where)
    prefix = row.get("answer_prefix", "")
    limit = row.get("max_answer")
    if not isinstance(prefix, str) or not (limit is None or isinstance(limit, int)):
        raise ConfigError(f"{where}: answer_prefix must be text and max_answer a number")
    return messages, prefix, limit


def _messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The messages before the first answer, from any of the three forms of a line."""
    if "prompt" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    elif "turns" in row:
        messages = [{"role": "user", "content": x} for x in row["turns"][:1]]
    else:
        messages = list(row.get("messages") or [])
    opening: list[dict[str, str]] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        opening.append({"role": message.get("role"), "content": message.get("content")})
    for message in opening:
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise ConfigError(f"{where}: a message without text")
    if not opening or opening[-1]["role"] != "user":
        raise ConfigError(f"{where}: needs prompt, turns or messages with a user's first turn")
    return opening


def copy_prompts(
    text: str, chat: ChatFormat, count: int, words: tuple[int, int], *, pool: str, seed: int
) -> list[Prompt]:
    """Copying tasks over random passages of a text, of words[0]..words[1] words each.

    The answer is made to begin with the passage's own first words: a small model that would not
    copy on request then goes on by induction.
    """
    rng = random.Random(seed)
    pieces = re.findall(r"\S+\s*", text)
    prompts: list[Prompt] = []
    for _ in range(count if len(pieces) > words[0] else 0):
        size = min(rng.randint(*words), len(pieces) - 1)
        start = rng.randrange(len(pieces) - size)
        passage = "".join(pieces[start : start + size]).strip()
        task = rng.choice(COPY_TASKS).format(text=passage)
        prefix = "".join(pieces[start : start + rng.randint(3, 6)]).strip()
        tokens = chat.prompt([{"role": "user", "content": task}], prefix)
        prompts.append(Prompt(tokens=tokens, pool=pool, max_answer=min(300, 2 * size), kind="copy"))
    return prompts


def training_prompts(
    files: Sequence[str], texts: Sequence[str], chat: ChatFormat, *, copies: int, seed: int
) -> list[Prompt]:
    """Every prompt of the files, and `copies` copying tasks of each length from the texts."""
    prompts = [prompt for path in files for prompt in read_prompts(path, chat)]
    for number, path in enumerate(texts):
        text = Path(path).read_text(encoding="utf-8")
        share = max(1, copies // len(texts))
        for pool, words in (("chat", (40, 260)), ("long", (200, 900))):
            prompts += copy_prompts(text, chat, share, words, pool=pool, seed=seed + number)
    return prompts
