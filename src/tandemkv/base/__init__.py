"""Words and values that every layer shares: ids, spans, errors, sampling parameters. No torch."""
