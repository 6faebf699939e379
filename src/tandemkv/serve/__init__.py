"""The server: the OpenAI HTTP API over one engine, with text, metrics and errors in its shapes."""
