# omni-server: CUDA by default; on CPU with: docker build --build-arg TARGET=cpu .
#
#   docker build -t omni-server .
#   docker run --gpus all --shm-size=4g -p 8091:8091 \
#     -v ~/.cache/huggingface:/home/omni/.cache/huggingface -v omni-cache:/home/omni/.cache \
#     omni-server Qwen/Qwen2.5-Omni-7B

ARG TARGET=cuda
# torch's wheels bring their own CUDA libraries; `-devel-` in place of `-runtime-` adds nvcc, for kernels that are
# compiled at run time.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-runtime-ubuntu24.04

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS base-cuda
FROM ubuntu:24.04 AS base-cpu

# hadolint ignore=DL3006
FROM base-${TARGET}
ARG TARGET
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Ubuntu 24.04 has Python 3.12. The compiler and the headers are for Triton and torch.compile, which build at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/omni
ENV PATH=/opt/omni/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Dependencies before sources: this layer, the large one, is built again only when the dependencies change.
WORKDIR /src
COPY pyproject.toml setup.py LICENSE README.md ./
# hadolint ignore=DL3013
RUN mkdir omni_server stages configs \
    && echo '__version__ = "0.0.0"' > omni_server/__init__.py \
    && if [ "$TARGET" = cpu ]; then pip install --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu; fi \
    && pip install ".[$TARGET]" \
    && pip uninstall --yes omni-server \
    && rm -rf build ./*.egg-info

COPY omni_server omni_server
COPY stages stages
COPY configs configs
RUN pip install --no-deps .

# Uid 1000, so that the cache of the usual first user of the host can be mounted; Ubuntu's image has taken it.
RUN userdel --remove ubuntu \
    && useradd --create-home --uid 1000 omni \
    && install -d -o omni -g omni /home/omni/.cache /home/omni/.cache/huggingface
USER 1000:1000
WORKDIR /home/omni
# Models, and what torch.compile and Triton have compiled: kept in a volume, the next start has it already.
ENV TRITON_CACHE_DIR=/home/omni/.cache/triton
VOLUME /home/omni/.cache

EXPOSE 8091
# With TLS, another port or --root-path: set it to the URL that answers in this container.
ENV OMNI_SERVER_HEALTH_URL=http://127.0.0.1:8091/health
# Loading a large model takes minutes: until start-period is over, failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['OMNI_SERVER_HEALTH_URL'], timeout=4)"]

# MODEL and flags follow on the command line of `docker run`.
ENTRYPOINT ["omni-server", "serve", "--host", "0.0.0.0"]
CMD ["--help"]
