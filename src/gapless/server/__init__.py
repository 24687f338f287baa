"""An HTTP server that OpenAI's and Ollama's clients use without noticing: front end, text workers, engine."""
