"""Models: the target behind transformers, drafters, attention over pages, sampling, verification."""
