"""`convert` and `train`: models made ready, drafters made.

Law: nothing is downloaded unless a hub id is named. The work is done elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace

import typer

from tandemkv.cli.options import MODEL_ARGUMENT, Opt, command

_CONVERT = (Opt("cache_dir", str, "Where converted models are kept."),)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    command(app, "convert", MODEL_ARGUMENT, *_CONVERT)(convert)


def convert(given: SimpleNamespace) -> None:
    """Prepare a model's weights (a GGUF file, or the embedded default) and print where they are."""
    from tandemkv.model.checkpoint import resolve

    print(resolve(given.model, cache_dir=given.cache_dir))
