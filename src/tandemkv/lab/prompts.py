"""Prompt sets: bundled conversations, the presets' questions, and a user's JSONL file.

Law: a Conversation that exists can be run: at least one turn, each with text; a bad line is refused
with its file and number. This module does not tokenize with a model of its own: `PromptTokens`
turns a conversation into ids with the tokenizer it is given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from tandemkv.base.errors import ConfigError

BUNDLED = {
    "bundled": "30 conversations of two turns: chat, maths, code, retrieval, copying",
    "mt_bench": "the 80 questions of MT-bench, two turns",
    "gsm8k": "the first 200 questions of the GSM8K test part, one turn",
}
"""Prompt sets that ship with the package, by name."""

_SENTINEL = "TANDEMKVANSWER"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """opening: messages up to the first answer, ending with a user's. follow_ups: later turns."""

    id: str
    kind: str
    opening: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()


def load(name: str, limit: int | None = None) -> list[Conversation]:
    """The conversations of a bundled set or of a JSONL file, in order, at most `limit`.

    Raises ConfigError naming the option, or the file's line at fault.
    """
    if name in BUNDLED:
        text = (files("tandemkv.lab") / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    else:
        text = _read(Path(name))
    lines = ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())
    found = [_parse(f"{name}, line {i}", i, line) for i, line in islice(lines, limit)]
    if not found:
        raise ConfigError(f"--prompts {name}: no conversation in it")
    seen: Counter[str] = Counter()
    for i, conversation in enumerate(found):
        seen[conversation.id] += 1
        if (count := seen[conversation.id]) > 1:
            found[i] = msgspec.structs.replace(conversation, id=f"{conversation.id}#{count}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"--prompts {path}, line {line}: not valid UTF-8") from None
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(
            f"--prompts {path}: neither a file nor one of {', '.join(BUNDLED)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from None


def _parse(where: str, number: int, line: str) -> Conversation:
    """One JSONL line: {"turns": [text, ...]}, {"messages": [...]} or {"prompt": text}."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompts {where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"--prompts {where}: expected an object, got {type(row).__name__}")
    forms = [form for form in ("turns", "messages", "prompt") if form in row]
    if len(forms) != 1:
        problem = f"has {' and '.join(forms)}" if forms else "has none"
        raise ConfigError(f"--prompts {where}: needs one of turns, messages, prompt; {problem}")
    opening, follow_ups = _FORMS[forms[0]](where, row[forms[0]])
    name = row.get("id", row.get("question_id", row.get("uid", number)))
    kind = row.get("kind", row.get("category", ""))
    return Conversation(id=str(name), kind=str(kind), opening=opening, follow_ups=follow_ups)


_Turns = tuple[tuple[dict[str, str], ...], tuple[str, ...]]


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"--prompts {where}: {field} must be text that is not empty")
    return value


def _from_prompt(where: str, value: Any) -> _Turns:
    return ({"role": "user", "content": _text(where, "prompt", value)},), ()


def _from_turns(where: str, value: Any) -> _Turns:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"--prompts {where}: turns must be a list of user messages, not empty")
    first, *rest = [_text(where, f"turns[{i}]", turn) for i, turn in enumerate(value)]
    return ({"role": "user", "content": first},), tuple(rest)


def _from_messages(where: str, value: Any) -> _Turns:
    """Messages up to the first answer open; later user messages are follow-ups, answered anew."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"--prompts {where}: messages must be a list, not empty")
    opening: list[dict[str, str]] = []
    follow_ups: list[str] = []
    answered = False
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise ConfigError(
                f"--prompts {where}: messages[{i}] needs a role of system, user or assistant"
            )
        content = _text(where, f"messages[{i}].content", message.get("content"))
        if not answered and role != "assistant":
            opening.append({"role": role, "content": content})
        elif role == "user":
            follow_ups.append(content)
        elif role == "system":
            raise ConfigError(f"--prompts {where}: messages[{i}]: a system message after an answer")
        answered = answered or role == "assistant"
    if not opening or opening[-1]["role"] != "user":
        raise ConfigError(f"--prompts {where}: a user message must come before any answer")
    return tuple(opening), tuple(follow_ups)


_FORMS = {"turns": _from_turns, "messages": _from_messages, "prompt": _from_prompt}


class PromptTokens:
    """Conversations as token ids, by a transformers tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def first(self, conversation: Conversation) -> list[int]:
        """The first turn's prompt."""
        return self.opening(conversation.opening)

    def opening(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The prompt of messages that end with a user's."""
        return self._encode(self._render(messages))

    def length(self, text: str) -> int:
        """How many tokens a text has by itself."""
        return len(self._encode(text))

    def second(
        self, conversation: Conversation, prompt: Sequence[int], output: Sequence[int]
    ) -> list[int] | None:
        """The first turn's prompt, its output and the next user message; None without one."""
        if not conversation.follow_ups:
            return None
        return self.extend(conversation.opening, conversation.follow_ups[0], prompt, output)

    def extend(
        self,
        messages: Sequence[dict[str, str]],
        text: str,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> list[int]:
        """The prompt of `messages`, its output, and a user's next message, as one prompt.

        The output's ids are kept as generated (text would not always come back as the same ids),
        less a closing end-of-turn token, which the template writes itself.
        """
        whole = [
            *messages,
            {"role": "assistant", "content": _SENTINEL},
            {"role": "user", "content": text},
        ]
        rest = self._render(whole).rpartition(_SENTINEL)[2]
        answer = list(output)
        if answer and answer[-1] in self._eos:
            answer.pop()
        return [*prompt, *answer, *self._encode(rest)]

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        if getattr(self._tokenizer, "chat_template", None):
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        return "\n\n".join(m["content"] for m in messages) + "\n\n"

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
