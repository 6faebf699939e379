"""Chat messages, checked, and the prompt that the model's own template makes of them.

Law: what a message carries reaches the template or is refused by its place and name. A template
that fails is the client's error, one line. The request around the messages is not known here.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tandemkv.base.errors import RequestError
from tandemkv.serve.fields import named, shown

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 4096

Message = dict[str, str]
"""role, content and, when given, name."""

# What clients echo from our own answers, when it says nothing.
_EMPTY_FIELDS = ("refusal", "audio", "function_call", "tool_calls", "annotations")
_FREE_KWARGS = re.compile(
    r"(?!conversation|messages|token|add_|continue_|chat_|tools|documents)"
    r"(?!return_|padding|truncation|max_length)[A-Za-z]\w*",
    re.ASCII,
)
"""Names a client may set in the template; the others belong to the call or to other fields."""


class TemplateOptions(msgspec.Struct, frozen=True):
    """How the template ends: with the assistant's opening, or inside the last message."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}


def parse_messages(value: Any) -> tuple[Message, ...]:
    """The messages of a chat request. Raises RequestError (param messages)."""
    if value is None:
        raise _refused("messages is missing")
    if not isinstance(value, list):
        raise _refused("messages must be a list")
    if not value:
        raise _refused("messages is empty: at least one message is needed")
    if len(value) > MAX_MESSAGES:
        raise _refused(f"messages has {len(value)} entries, at most {MAX_MESSAGES}")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise _refused(f"{where} must be an object with role and content")
    role = item.get("role")
    if role in ("tool", "function"):
        raise _refused(f"{where} has role {role}: tools are not offered by this server")
    if role not in ROLES:
        raise _refused(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    for name, extra in item.items():
        if name in ("role", "content", "name") or extra is None:
            continue
        if name not in _EMPTY_FIELDS or extra != []:
            raise _refused(f"{where}.{named(name)} is not offered by this server")
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _content(item.get("content"), f"{where}.content")
    name = item.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise _refused(f"{where}.name must be a string")
        message["name"] = name
    return message


def _content(value: Any, where: str) -> str:
    """A string, or the text parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _refused(f"{where} must be a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _refused(f"{where} must be an object with type and text")
    if part.get("type") != "text":
        raise _refused(f"{where} has type {shown(part.get('type'))}: only text is offered")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{where}.text must be a string")
    for name, extra in part.items():
        if name not in ("type", "text") and extra is not None:
            raise _refused(f"{where}.{named(name)} is not offered by this server")
    return part["text"]


def render(tokenizer: Any, messages: tuple[Message, ...], options: TemplateOptions) -> str:
    """The prompt's text. tokenizer: a transformers tokenizer. Raises RequestError."""
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model's tokenizer has no chat template: use /v1/completions", param="messages"
        )
    for name in options.kwargs:
        if not _FREE_KWARGS.fullmatch(name):
            raise RequestError(
                f"chat_template_kwargs.{named(name)} is not offered", param="chat_template_kwargs"
            )
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.kwargs,
        )
    except Exception as error:  # a template is a program of the model's, run on a client's data
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(
            f"the chat template refused the messages: {reason}", param="messages"
        ) from None


def _refused(message: str) -> RequestError:
    return RequestError(message, param="messages")
