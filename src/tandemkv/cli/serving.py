"""`serve`, `generate`, `chat`: the engine for clients, for one prompt, for a conversation.

Law: what is printed on stdout is the model's text alone; acceptance and remarks go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from tandemkv.base.errors import ConfigError, RequestError, TandemError
from tandemkv.cli.options import (
    ENGINE,
    MODEL,
    MODEL_ARGUMENT,
    SAMPLING,
    Opt,
    command,
    engine_config,
)

if TYPE_CHECKING:
    from tandemkv.base.sampling import SamplingParams
    from tandemkv.engine.engine import Engine
    from tandemkv.sched.request import Request

DEFAULT_MAX_TOKENS = 256
_SERVE = (
    Opt("host", str, "Address to listen on; default 127.0.0.1."),
    Opt("port", int, "Port; default 8000, 0 takes a free one."),
    Opt("model_option", str, "The same as MODEL.", ("--model",)),
)
_GENERATE = (
    Opt("prompt", str, "The user's message; `-` reads it from stdin.", positional=True),
    Opt("raw", bool, "Continue the text as it is, without the chat template.", ("--raw",)),
)
_CHAT = (Opt("system", str, "A system message."),)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    command(app, "serve", MODEL_ARGUMENT, *_SERVE, *ENGINE)(serve)
    command(app, "generate", *_GENERATE, MODEL, *SAMPLING, *ENGINE)(generate)
    command(app, "chat", MODEL, *_CHAT, *SAMPLING, *ENGINE)(chat)


def serve(given: SimpleNamespace) -> None:
    """Serve the OpenAI API: chat, completions, metrics."""
    if given.model_option is not None:
        if given.model not in (None, given.model_option):
            raise ConfigError("MODEL and --model name two models; give one")
        given.model = given.model_option
    config = engine_config(given)
    port = 8000 if given.port is None else given.port
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be in [0, 65535], got {port}")
    from tandemkv.engine.background import AsyncEngine
    from tandemkv.engine.engine import Engine
    from tandemkv.serve.http import bind, run_server

    sock = bind(given.host or "127.0.0.1", port)  # a port in use is said before models load
    run_server(AsyncEngine(Engine.from_config(config)), sock)


def generate(given: SimpleNamespace) -> None:
    """Answer one prompt, streaming, with the acceptance length shown."""
    config = engine_config(given)
    params = _params(given)
    text = sys.stdin.read() if given.prompt == "-" else given.prompt
    if not text or not text.strip():
        raise RequestError("the prompt is empty: give a text, or - to read it from stdin")
    engine = _load(config)
    if given.raw:
        prompt = list(engine.tokenizer.encode(text))
    else:
        prompt = _encoder(engine).opening([{"role": "user", "content": text}])
    _answer(engine, prompt, params)


def chat(given: SimpleNamespace) -> None:
    """Talk with the model; an empty line or end of file ends it."""
    config = engine_config(given)
    params = _params(given)
    engine = _load(config)
    encoder = _encoder(engine)
    messages: list[dict[str, str]] = []
    if given.system:
        messages.append({"role": "system", "content": given.system})
    prompt: list[int] = []
    output: list[int] = []
    while (text := _ask()) is not None:
        message = {"role": "user", "content": text}
        if prompt:
            prompt = encoder.extend(messages[:-1], text, prompt, output)
        else:
            prompt = encoder.opening([*messages, message])
        try:
            output, answer = _answer(engine, prompt, params)
        except RequestError as error:
            raise RequestError(f"{error}; the conversation is too long, start a new one") from None
        messages += [message, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """The user's next line; None at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() or None


def _params(given: SimpleNamespace) -> SamplingParams:
    from tandemkv.base.sampling import SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS}
    values |= {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return SamplingParams(**values)


def _load(config: Any) -> Engine:
    from tandemkv.engine.engine import Engine

    return Engine.from_config(config)


def _encoder(engine: Engine) -> Any:
    from tandemkv.lab.prompts import PromptTokens

    return PromptTokens(engine.tokenizer, engine.target.spec.eos_token_ids)


def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """Stream an answer to stdout and its figures to stderr; the output's ids and text."""
    import time

    from tandemkv.serve.text import TextStream

    room = engine.max_model_len - len(prompt)
    if 0 < room < params.max_tokens:
        import msgspec

        params = msgspec.structs.replace(params, max_tokens=room)
    stream = TextStream(engine.tokenizer)
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        print(text, end="", flush=True)

    started = time.perf_counter()
    request = engine.add(prompt, params)
    try:
        while engine.has_work:
            for output in engine.step():
                stream.push(output.tokens)
                show(stream.take())
    except BaseException:
        engine.abort(request.id)
        raise
    show(stream.finish())
    print(flush=True)
    if request.error is not None:
        raise TandemError(request.error)
    print(_figures(request, time.perf_counter() - started, len(prompt)), file=sys.stderr)
    return list(request.output), "".join(shown)


def _figures(request: Request, seconds: float, num_prompt: int) -> str:
    accepted: Any = request.acceptance
    tokens: Sequence[int] = request.output
    drafted = (
        f", AL {accepted.mean_length:.2f} over {accepted.num_steps} steps"
        if accepted.num_steps
        else ""
    )
    return (
        f"[{num_prompt} prompt tokens, {request.cached_tokens} cached; {len(tokens)} tokens,"
        f" {len(tokens) / seconds:.1f} tokens/s{drafted}]"
    )
