"""The cache library: one prefix tree whose blocks hold pages for every layer group. No torch."""
