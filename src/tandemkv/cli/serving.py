"""`serve`, `generate`, `chat`: the engine for clients, for one prompt, for a conversation.

Law: what is printed on stdout is the model's text alone; acceptance and remarks go to stderr.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from tandemkv.base.errors import ConfigError, RequestError, TandemError
from tandemkv.cli.disaggregate import num_workers, share_cores
from tandemkv.cli.loading import asked, description, load, watched
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
    from tandemkv.base.config import EngineConfig
    from tandemkv.base.sampling import SamplingParams
    from tandemkv.engine.engine import Engine
    from tandemkv.sched.request import Request

DEFAULT_MAX_TOKENS = 256
DEFAULT_GRACE_S = 10.0
MAX_GRACE_S = 86400
_SERVE = (
    Opt("host", str, "Address to listen on.", default="127.0.0.1"),
    Opt("port", int, "Port; 0 takes a free one.", default="8000"),
    Opt("grace", float, "Seconds that requests in flight have when it stops.", default="10"),
    Opt("model_option", str, "The same as MODEL.", ("--model",)),
    Opt(
        "disaggregate",
        str,
        "Compute prompts in processes of their own: 1p1d, or NpMd for N of them and M that"
        " generate tokens over the rows that they ship, the drafter's included.",
        default="off",
    ),
    Opt(
        "draft_transfer",
        bool,
        "Whether the drafter's rows are shipped too.",
        ("--draft-transfer/--no-draft-transfer",),
        default="on",
    ),
)
_GENERATE = (
    Opt("prompt", str, "The user's message; `-` reads it from stdin.", positional=True),
    Opt(
        "raw",
        bool,
        "Continue the text as it is, without the chat template.",
        ("--raw",),
        default="off",
    ),
)
_CHAT = (Opt("system", str, "A system message.", default="the template's"),)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    command(
        app,
        "serve",
        *(MODEL_ARGUMENT, *_SERVE, *ENGINE),
        examples=(
            "tandemkv serve",
            "tandemkv serve ./my-model --drafter-path ./my-drafter --port 9000",
        ),
    )(serve)
    command(
        app,
        "generate",
        *(*_GENERATE, MODEL, *SAMPLING, *ENGINE),
        examples=(
            'tandemkv generate "Why is the sky blue?"',
            "tandemkv generate - --raw --max-tokens 64 < text.txt",
        ),
    )(generate)
    command(
        app,
        "chat",
        *(MODEL, *_CHAT, *SAMPLING, *ENGINE),
        examples=('tandemkv chat --system "Answer in one sentence." --temperature 0.7 --seed 1',),
    )(chat)


def serve(given: SimpleNamespace) -> None:
    """Serve the OpenAI API: chat, completions, metrics."""
    if given.model_option is not None:
        if given.model not in (None, given.model_option):
            raise ConfigError("MODEL and --model name two models; give one")
        given.model = given.model_option
    config = engine_config(given)
    port, grace_s = port_and_grace(given)
    workers, num_decode = num_workers(given.disaggregate)
    if given.draft_transfer is not None and not workers:
        raise ConfigError("--draft-transfer says nothing without --disaggregate")
    config = share_cores(config, workers, num_decode)
    from tandemkv.serve.address import bind

    sock = bind(given.host or "127.0.0.1", port)  # a port in use is said before anything loads
    if num_decode > 1:
        _serve_together(given, config, sock, grace_s)
        return
    engine: Any = load(config, shown=True)
    from tandemkv.engine.background import AsyncEngine
    from tandemkv.serve.service import run_server

    about = description(engine.resolved)
    if workers:
        from tandemkv.engine.decode import DecodeWorker

        print(f"starting {workers} prefill worker(s) ...", file=sys.stderr, flush=True)
        engine = DecodeWorker(engine, workers, draft_transfer=given.draft_transfer is not False)
        about = f"{workers}p1d, {about}"
    run_server(AsyncEngine(engine), sock, grace_s=grace_s, about=about)


def port_and_grace(given: SimpleNamespace) -> tuple[int, float]:
    """--port and --grace, or their defaults. Raises ConfigError."""
    port = 8000 if given.port is None else given.port
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be in [0, 65535], got {port}")
    grace_s = DEFAULT_GRACE_S if given.grace is None else given.grace
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ConfigError(f"--grace must be in [0, {MAX_GRACE_S}] seconds, got {grace_s}")
    return port, grace_s


def _serve_together(
    given: SimpleNamespace, config: EngineConfig, sock: socket.socket, grace_s: float
) -> None:
    """Several decode workers: all workers are processes, the router is this one."""
    from tandemkv.serve.together import Together

    prefill, decode = num_workers(given.disaggregate)
    print(
        f"loading {asked(config)}, in {prefill} prefill and {decode} decode workers ...",
        file=sys.stderr,
        flush=True,
    )
    transfer = given.draft_transfer is not False
    together = Together(config, prefill, decode, draft_transfer=transfer, grace_s=grace_s)
    together.run(sock, grace_s=grace_s, about=given.disaggregate)


def generate(given: SimpleNamespace) -> None:
    """Answer one prompt, streaming, with its acceptance length."""
    config = engine_config(given)
    params = _params(given)
    text = sys.stdin.read() if given.prompt == "-" else given.prompt
    if not text or not text.strip():
        raise RequestError("the prompt is empty: give a text, or - to read it from stdin")
    engine = load(config, shown=watched(given.verbose))
    if given.raw:
        prompt = list(engine.tokenizer.encode(text))
    else:
        prompt = _encoder(engine).opening([{"role": "user", "content": text}])
    _answer(engine, prompt, params)


def chat(given: SimpleNamespace) -> None:
    """Talk with the model; an empty line or end of file ends it."""
    config = engine_config(given)
    params = _params(given)
    engine = load(config, shown=watched(given.verbose))
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
