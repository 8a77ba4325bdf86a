# omni-server: for NVIDIA GPUs by default, for CPUs with --build-arg TARGET=cpu. How to build and run it, with
# Docker and without: docs/container.md.
#
#   docker build --build-arg TARGET=cpu -t omni-server:cpu .
#   docker run --rm --shm-size=4g -p 127.0.0.1:8091:8091 omni-server:cpu                   # the speaking demo
#   docker run --rm --shm-size=4g -p 127.0.0.1:8091:8091 omni-server:cpu MODEL --flag ...

ARG TARGET=cuda
# Either base needs Python 3.11 or 3.12 as its python3, and apt-get. torch's wheels bring their own CUDA
# libraries; `-devel-` in place of `-runtime-` adds nvcc, for kernels that are compiled at run time.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
ARG CPU_IMAGE=debian:12-slim

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS base-cuda
# hadolint ignore=DL3006
FROM ${CPU_IMAGE} AS base-cpu

# hadolint ignore=DL3006
FROM base-${TARGET}
ARG TARGET
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The compiler and the headers are for Triton and torch.compile, which build at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc g++ libc6-dev libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Uid 1000, so that the cache of the usual first user of the host can be mounted. Ubuntu's images have that
# user under another name and with another home, Debian's have not: HOME, below, is the same in both.
RUN if ! getent passwd 1000; then useradd --home-dir /home/omni --shell /bin/bash --uid 1000 omni; fi \
    && install -d -o 1000 -g 1000 /home/omni /home/omni/.cache /home/omni/.cache/huggingface

RUN python3 -m venv /opt/omni
ENV PATH=/opt/omni/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Dependencies before sources: this layer, the large one, is built again only when the dependencies change.
# What they are installed for is an empty package here. A pip.conf comes as a secret, which no layer keeps.
WORKDIR /src
COPY pyproject.toml setup.py LICENSE README.md ./
# hadolint ignore=DL3013
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    mkdir omni_server stages configs \
    && touch omni_server/__init__.py \
    && echo 'VERSION = "0.0.0"' > omni_server/version.py \
    && if [ "$TARGET" = cpu ]; then pip install --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu; fi \
    && pip install ".[$TARGET]" \
    && pip uninstall --yes omni-server \
    && rm -rf build ./*.egg-info omni_server

COPY omni_server omni_server
COPY stages stages
COPY configs configs
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --no-deps . \
    && rm -rf build ./*.egg-info

USER 1000:1000
WORKDIR /home/omni
# Models, and what torch.compile and Triton have compiled: kept in a volume, the next start has it already.
ENV HOME=/home/omni \
    TRITON_CACHE_DIR=/home/omni/.cache/triton
VOLUME /home/omni/.cache

EXPOSE 8091
# With TLS, another port or --root-path: set it to the URL that answers in this container.
ENV OMNI_SERVER_HEALTH_URL=http://127.0.0.1:8091/health
# Loading a large model takes minutes: until start-period is over, failures do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import os; from urllib.request import urlopen; \
urlopen(os.environ['OMNI_SERVER_HEALTH_URL'], timeout=4)"]

# MODEL and flags follow on the command line of `docker run`. Without them it is the demo that speaks.
ENTRYPOINT ["omni-server", "serve", "--host", "0.0.0.0"]
