# delta on NVIDIA GPUs, with vLLM in an environment of its own, because vLLM pins other versions of torch and transformers.
#   docker build -t delta .
#   docker run --gpus all --ipc=host -v "$PWD:/runs" delta train qwen3_8b_lora --fit
# Without vLLM, which halves the image: docker build --build-arg VLLM= -t delta .
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

ARG VLLM=vllm
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# bubblewrap is the sandbox of the code reward.
RUN apt-get update && apt-get install -y --no-install-recommends \
      bubblewrap build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/delta && python3 -m venv /opt/vllm
RUN if [ -n "$VLLM" ]; then /opt/vllm/bin/pip install "$VLLM"; fi

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY delta_cli delta_cli
COPY backends backends
COPY recipes recipes
RUN /opt/delta/bin/pip install --constraint constraints.txt '.[torch,hub,quantised,tensorboard]'

# A recipe with engine.launch = true finds vLLM with --set engine.python=/opt/vllm/bin/python.
ENV PATH=/opt/delta/bin:$PATH HF_HOME=/runs/.cache/huggingface
WORKDIR /runs
ENTRYPOINT ["delta"]
CMD ["--help"]
