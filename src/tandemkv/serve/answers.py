"""Response bodies and stream chunks of the OpenAI API, as plain dictionaries.

Law: a streamed answer, put together, is the whole answer: text, tokens, log probabilities, finish
reasons and usage. usage counts emitted tokens only; drafts are counted apart, under
metrics.speculative_decoding. Pure: nothing here waits, tokenizes a prompt or knows the transport.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tandemkv.base.logprobs import TokenLogprobs

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]

DONE = b"data: [DONE]\n\n"
"""What ends a stream of events."""


class Envelope(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    object: str
    model: str
    created: int

    @classmethod
    def new(cls, id: str, object: str, model: str) -> Envelope:
        return cls(id, object, model, int(time.time()))

    def body(self, choices: list[Json], **extra: Any) -> Json:
        out: Json = msgspec.structs.asdict(self)
        return {**out, "choices": choices, **extra}


class Piece(msgspec.Struct):
    """News of one choice, or all of it: text is what its tokens add, after stop handling."""

    index: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    prompt_tokens: list[int] | None = None  # wanted by the client, on the first piece


class Acceptance(msgspec.Struct):
    """How drafts fared over one answer: verify steps with a draft, drafts, accepted drafts.

    accepted_at[j]: steps in which the draft at position j was accepted. num_spec_tokens: K.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = []
    num_spec_tokens: int = 0

    def add(self, steps: int, drafts: int, accepted: int, accepted_at: Sequence[int]) -> None:
        """Pool another request's counts."""
        self.num_steps += steps
        self.num_drafts += drafts
        self.num_accepted += accepted
        longer, shorter = sorted((self.accepted_at, list(accepted_at)), key=len, reverse=True)
        self.accepted_at = [
            a + (shorter[j] if j < len(shorter) else 0) for j, a in enumerate(longer)
        ]

    def histogram(self) -> list[int]:
        """Entry j: steps that accepted exactly j drafts; K + 1 entries, their sum is num_steps."""
        width = max(self.num_spec_tokens, len(self.accepted_at))
        reached = [self.num_steps, *self.accepted_at, *[0] * (width + 1)]
        return [reached[j] - reached[j + 1] for j in range(width + 1)]

    def body(self) -> Json:
        """The block that vLLM calls metrics.speculative_decoding. AL is 1 without a draft."""
        steps, drafts = self.num_steps, self.num_drafts
        return {
            "mean_acceptance_length": 1.0 + self.num_accepted / steps if steps else 1.0,
            "draft_acceptance_rate": self.num_accepted / drafts if drafts else None,
            "acceptance_histogram": self.histogram(),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": drafts,
            "num_spec_tokens": self.num_spec_tokens,
        }


class Format:
    """How one endpoint writes pieces. chat: messages and deltas, else completions.

    logprobs: whether the client asked for any.
    """

    def __init__(
        self, *, chat: bool, logprobs: bool, return_token_ids: bool, token_bytes: TokenBytes
    ) -> None:
        self.chat = chat
        self._logprobs = logprobs
        self._return_token_ids = return_token_ids
        self._token_bytes = token_bytes
        self._offsets: dict[int, int] = {}

    @property
    def object(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def whole(self, piece: Piece) -> Json:
        """A finished choice."""
        if not self.chat:
            return self._choice(piece, text=piece.text)
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, message=message)

    def opening(self, piece: Piece) -> Json | None:
        """What a stream says first about a choice: the role; for completions, an echoed prompt."""
        if self.chat:
            return self._choice(piece, delta={"role": "assistant", "content": ""})
        return self._choice(piece, text=piece.text) if piece.text or piece.prompt_tokens else None

    def delta(self, piece: Piece) -> Json:
        """A streamed part of a choice."""
        if not self.chat:
            return self._choice(piece, text=piece.text)
        return self._choice(piece, delta={"content": piece.text} if piece.text else {})

    def says_something(self, piece: Piece) -> bool:
        """Whether a streamed piece carries anything that its client asked for."""
        wants_tokens = self._logprobs or self._return_token_ids
        return bool(piece.text or (wants_tokens and piece.tokens))

    def _choice(self, piece: Piece, **what: Any) -> Json:
        entries = piece.logprobs
        logprobs = None
        if self._logprobs and (entries or piece.tokens):
            logprobs = self._chat_logprobs(entries) if self.chat else self._text_logprobs(piece)
        out: Json = {"index": piece.index, **what, "logprobs": logprobs}
        out["finish_reason"] = piece.finish_reason
        if self._return_token_ids:
            out["token_ids"] = piece.tokens
            if piece.prompt_tokens is not None:
                out["prompt_token_ids"] = piece.prompt_tokens
        return out

    def _chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> Json:
        def entry(token: int, logprob: float) -> Json:
            raw = self._token_bytes(token)
            return {"token": _text(raw), "logprob": finite(logprob), "bytes": list(raw)}

        content = [
            {**entry(e.token, e.logprob), "top_logprobs": [entry(t, lp) for t, lp in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, piece: Piece) -> Json:
        entries = piece.logprobs
        tokens = [_text(self._token_bytes(e.token)) for e in entries]
        offset = self._offsets.get(piece.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[piece.index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(e.logprob) for e in entries],
            "tokens": tokens,
            "top_logprobs": [
                {_text(self._token_bytes(t)): finite(lp) for t, lp in e.top} for e in entries
            ],
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """The usage block. cached_tokens: how much of the prompts was a prefix hit."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(body: Json) -> bytes:
    """A server-sent event of one JSON object."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(message: str, status: int, param: str | None = None) -> Json:
    """An error in the API's shape; the message is cut to one line of at most 500 characters."""
    line = " ".join(message.split())
    if len(line) > 500:
        line = line[:497] + "..."
    types = {404: "not_found_error", 503: "service_unavailable_error", 500: "internal_error"}
    kind = types.get(status, "invalid_request_error")
    code: str | int = status
    if status == 404 and param == "model":
        code = "model_not_found"
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


def models_body(model: str, max_model_len: int, created: int) -> Json:
    """The one served model, as an entry of /v1/models."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "tandemkv",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }


def finite(logprob: float) -> float:
    """JSON has no -inf; a token that cannot be has the log probability that others also use."""
    return max(float(logprob), -9999.0)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """token id -> the bytes it stands for, so that a client can join tokens into valid text.

    Byte-level vocabularies write each byte as one printable character (GPT-2's table), others
    write single bytes as <0xE2>; everything else is what the tokenizer decodes.
    """
    printable = _byte_characters()

    @functools.lru_cache(maxsize=65536)
    def token_bytes(token: int) -> bytes:
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if byte_level and token not in special and all(c in printable for c in piece):
            return bytes(printable[c] for c in piece)
        text: str = tokenizer.decode([token])
        return text.encode()

    special = set(getattr(tokenizer, "all_special_ids", ()))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))
    return token_bytes


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for 256, 257, ..."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain}
    return table | {chr(256 + i): b for i, b in enumerate(others)}
