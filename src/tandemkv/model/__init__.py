"""Models: the target behind transformers, drafters, paged attention, sampling, verification."""
