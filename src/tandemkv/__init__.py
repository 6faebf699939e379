"""TandemKV: speculative decoding with the drafter's KV cache as a first-class citizen.

Importing the package is cheap: nothing here imports torch. ARCHITECTURE.md has the map.
"""

__version__ = "0.1.0"
