# The same for GPUs: vLLM's own image brings CUDA, torch and the engine of the version that the lock names.
#   docker build -f docker/gpu.Dockerfile -t lookonce-gpu .
FROM vllm/vllm-openai:v0.32.0

RUN useradd --create-home --uid 10001 lookonce
WORKDIR /opt/lookonce
COPY pyproject.toml README.md LICENSE ./
COPY encoder_service encoder_service
COPY llm_service llm_service
COPY lookonce lookonce
COPY shared shared
RUN python3 -m pip install --no-cache-dir '.[gpu]'
COPY configs configs
COPY models models

USER lookonce
EXPOSE 8000
ENTRYPOINT ["lookonce"]
CMD ["serve", "--config", "configs/demo.yaml", "--host", "0.0.0.0"]
