"""lookonce beside a monolithic ``vllm serve``: same cores, checkpoint, client and requests, over OpenAI's HTTP API."""
