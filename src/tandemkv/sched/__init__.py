"""The scheduler: which requests run in a step, over which positions, with which pages. No torch."""
