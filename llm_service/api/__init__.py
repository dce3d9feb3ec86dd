"""The HTTP endpoint: OpenAI's chat completions over an encoder pool and a language pool."""
