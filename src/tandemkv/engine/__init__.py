"""The aggregated engine: plan, run, apply; and a thread that runs it for a server."""
