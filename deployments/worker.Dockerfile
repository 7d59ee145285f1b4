# A worker, or the image of a docker or kubernetes pool: soup-flows with its training stack on a CUDA base.
#   docker build -f deployments/worker.Dockerfile -t soup-flows:latest .
#   docker run --gpus all --shm-size 16g --ulimit memlock=-1 --init -e PREFECT_API_URL=http://HOST:4200/api \
#     -v /srv/soup-flows/outputs:/outputs -v /srv/soup-flows/cache:/cache \
#     -v /run/lock/soup-flows:/run/lock/soup-flows soup-flows:latest
# Run for a pool of type docker or kubernetes, the worker replaces the command and the entry point stays out of it.
ARG CUDA=12.8.1-devel-ubuntu24.04
FROM nvidia/cuda:${CUDA}

# A compiler and ninja: DeepSpeed builds its CPU Adam at the first off-load run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ ninja-build libaio-dev \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY soup_flows ./soup_flows
RUN pip install -c constraints.txt torch && pip install -c constraints.txt '.[train]'

# Runs need no root. The folders are volumes; see the job templates in soup_flows/deploy/templates.
RUN useradd --create-home --uid 10001 soup && mkdir -p /outputs /cache && chown soup /outputs /cache
USER soup
WORKDIR /outputs
ENV HF_HOME=/cache/huggingface PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30
VOLUME ["/outputs", "/cache"]
CMD ["prefect", "worker", "start", "--pool", "gpu"]
