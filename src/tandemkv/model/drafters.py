"""Drafters by name: from what an operator writes to a Drafter bound to its target.

Law: a drafter that does not fit its target, and an option that no drafter honours, are refused by
name before memory is touched. Options carry the names of vLLM's --speculative-config. This module
knows every drafter's module and nothing of their maths.

    eagle3        path or hub id; None: the drafter shipped for the embedded target
    dflash        the same; drafts a block of K tokens in one pass
    dspark        the same, with the bias of each drafted token on the next; confidence_threshold
                  ends a block where the drafter itself expects a rejection
    draft_model   path, hub id or GGUF file of a smaller causal LM with the same vocabulary
    ngram         no path: continues the longest suffix of the text that occurred before
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tandemkv.base.errors import ConfigError
from tandemkv.model.drafter import Drafter
from tandemkv.model.target import Target

WEIGHTS = Path(__file__).parent.parent / "weights"
SHIPPED = {name: WEIGHTS / f"{name}-smollm2-135m" for name in ("eagle3", "dflash", "dspark")}
"""The drafters of the embedded default target."""

OPTIONS = ("method", "model", "num_speculative_tokens", "draft_vocab")
NGRAM_OPTIONS = ("prompt_lookup_max", "prompt_lookup_min")
OWN_OPTIONS = {
    "ngram": NGRAM_OPTIONS,
    "dflash": ("confidence_threshold",),
    "dspark": ("confidence_threshold",),
}
"""Options that one method has beside OPTIONS."""


Bind = Callable[[Target, "torch.dtype | None", "torch.device | str | None"], Drafter]
"""A drafter whose options and checkpoint are known good, waiting for its target."""


def load_drafter(
    method: str,
    path: str | None,
    target: Target,
    *,
    num_draft_tokens: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    draft_vocab: int | None = None,
    options: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
) -> Drafter:
    """find_drafter, bound to `target`. dtype, device: the target's unless given."""
    bind = find_drafter(
        method,
        path,
        num_draft_tokens=num_draft_tokens,
        draft_vocab=draft_vocab,
        options=options,
        cache_dir=cache_dir,
    )
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return bind(target, dtype, device)


def find_drafter(
    method: str,
    path: str | None,
    *,
    num_draft_tokens: int | None = None,
    draft_vocab: int | None = None,
    options: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
) -> Bind:
    """All of a drafter that can be checked without its target, which takes long to load.

    num_draft_tokens: K, None for the drafter's default. draft_vocab: rows of the target's head to
    draft over (eagle3). options: as in vLLM's --speculative-config; they say the same as the
    arguments or nothing. Raises ConfigError; so does the result, where drafter and target part.
    """
    if method not in _FINDERS:
        raise ConfigError(f"drafter {method!r} is not one of {', '.join(_FINDERS)}")
    options = dict(options or {})
    _refuse_unknown(method, options)
    method = _agreed("method", method, options, "method")
    path = _agreed("drafter_path", path, options, "model")
    num = _agreed("num_draft_tokens", num_draft_tokens, options, "num_speculative_tokens")
    vocab = _agreed("draft_vocab", draft_vocab, options, "draft_vocab")
    for name, value in (("num_draft_tokens", num), ("draft_vocab", vocab)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name} must be an integer, got {value!r}")
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if vocab is not None and method not in SHIPPED:
        raise ConfigError(f"draft_vocab does not apply to drafter {method!r}")
    more = {} if num is None else {"num_draft_tokens": num}
    return _FINDERS[method](path, vocab, options, cache_dir, more)


def method_of(path: str, cache_dir: str | None = None) -> str:
    """The method of a checkpoint directory or hub id: what its config.json says it is."""
    from tandemkv.model.dflash_config import ARCHITECTURES, parse_config
    from tandemkv.model.draft_checkpoint import read_config

    config = read_config(_directory("eagle3", path, cache_dir))
    if any(name in ARCHITECTURES for name in config.get("architectures") or ()):
        return parse_config(config, path).method
    return "eagle3"


def _eagle3(
    path: str | None,
    draft_vocab: int | None,
    options: Mapping[str, Any],
    cache_dir: str | None,
    more: dict[str, int],
) -> Bind:
    from tandemkv.model.eagle3 import Eagle3
    from tandemkv.model.eagle3_checkpoint import read

    config, weights = read(_directory("eagle3", path, cache_dir))
    return lambda target, dtype, device: Eagle3(
        target,
        config,
        weights,
        draft_vocab=draft_vocab,
        origin=path or "eagle3",
        dtype=dtype,
        device=device,
        **more,
    )


def _block_drafter(method: str) -> Callable[..., Bind]:
    """The finder of dflash or dspark, which share all but what their rows predict."""

    def find(
        path: str | None,
        draft_vocab: int | None,
        options: Mapping[str, Any],
        cache_dir: str | None,
        more: dict[str, int],
    ) -> Bind:
        from tandemkv.model.dflash import DFlash
        from tandemkv.model.dflash_checkpoint import read

        config, weights = read(_directory(method, path, cache_dir))
        if config.method != method:
            raise ConfigError(
                f"{path or method}: is a {config.method} checkpoint, not {method}; ask for"
                f" {config.method}"
            )
        threshold = _share("confidence_threshold", options)
        return lambda target, dtype, device: DFlash(
            target,
            config,
            weights,
            draft_vocab=draft_vocab,
            confidence_threshold=threshold,
            origin=path or method,
            dtype=dtype,
            device=device,
            **more,
        )

    return find


def _share(name: str, options: Mapping[str, Any]) -> float | None:
    """An option that is a number from 0 to 1."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def _draft_model(
    path: str | None,
    draft_vocab: int | None,
    options: Mapping[str, Any],
    cache_dir: str | None,
    more: dict[str, int],
) -> Bind:
    from tandemkv.model.checkpoint import load_target
    from tandemkv.model.draft_lm import DraftModel

    if path is None:
        raise ConfigError("drafter 'draft_model' needs a model (drafter_path)")

    def bind(
        target: Target, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> Drafter:
        model = load_target(
            path,
            dtype=str(dtype or target.spec.dtype).removeprefix("torch."),
            device=str(device or target.spec.device),
            cache_dir=cache_dir,
        )
        _refuse_other_tokenizer(target, model, path)
        return DraftModel(target, model, origin=path, **more)

    return bind


def _ngram(
    path: str | None,
    draft_vocab: int | None,
    options: Mapping[str, Any],
    cache_dir: str | None,
    more: dict[str, int],
) -> Bind:
    from tandemkv.model.ngram import Ngram

    if path is not None and path != "ngram":
        raise ConfigError(f"drafter 'ngram' takes no model, got {path!r}")
    lookup = {k.removeprefix("prompt_lookup_"): options[k] for k in NGRAM_OPTIONS if k in options}
    sizes = {f"{k}_ngram": v for k, v in lookup.items() if v is not None}
    drafter = Ngram(**sizes, **more)
    return lambda target, dtype, device: drafter


_FINDERS: dict[str, Callable[..., Bind]] = {
    "eagle3": _eagle3,
    "dflash": _block_drafter("dflash"),
    "dspark": _block_drafter("dspark"),
    "draft_model": _draft_model,
    "ngram": _ngram,
}


def _refuse_other_tokenizer(target: Target, model: Target, origin: str) -> None:
    """Where both models bring a tokenizer, every token they share must have the same id."""
    from tandemkv.model.checkpoint import load_tokenizer

    vocabularies = []
    for each in (target, model):
        directory = Path(each.model.name_or_path or "")
        if not (directory / "tokenizer.json").is_file():
            return
        vocabularies.append(load_tokenizer(str(directory)).get_vocab())
    wanted, given = vocabularies
    for token in wanted.keys() & given.keys():
        if wanted[token] != given[token]:
            first = min((t for t in wanted if given.get(t, wanted[t]) != wanted[t]), key=wanted.get)
            raise ConfigError(
                f"{origin}: its tokenizer numbers {first!r} {given[first]}, the target's"
                f" {wanted[first]}: they are not the same vocabulary"
            )


def _refuse_unknown(method: str, options: Mapping[str, Any]) -> None:
    known = OPTIONS + OWN_OPTIONS.get(method, ())
    for name, value in options.items():
        if name == "draft_tensor_parallel_size" and value in (None, 1):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown option {name!r} for drafter {method!r}{hint}")


def _agreed(name: str, given: Any, options: Mapping[str, Any], key: str) -> Any:
    """The value of an argument that the options may repeat, but not contradict."""
    other = options.get(key)
    if given is not None and other is not None and given != other:
        raise ConfigError(f"{name} is {given!r}, and option {key!r} says {other!r}")
    return other if given is None else given


def _directory(method: str, path: str | None, cache_dir: str | None) -> Path:
    """A local directory: the shipped drafter, a path as given, or a hub id fetched once."""
    if path is None:
        shipped = SHIPPED[method]
        if not (shipped / "config.json").is_file():
            raise ConfigError(f"drafter {method!r} needs a checkpoint (drafter_path)")
        return shipped
    local = Path(path).expanduser()
    if local.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return local
    return _fetch(path, cache_dir)


def _fetch(hub_id: str, cache_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.safetensors", "*.bin", "mask_embedding.pt"],
            cache_dir=cache_dir,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"drafter {hub_id}: no such directory, and the hub gave none ({first})"
        ) from None
    return Path(found)
