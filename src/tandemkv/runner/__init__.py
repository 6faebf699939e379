"""From a step plan to a step result: pools in memory, packed inputs, the passes, in that order."""
