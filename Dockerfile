# Image for docker run and for k8s/. How to build it for CPU and for GPU: k8s/README.md
#   BASE         must carry Python 3.11 or newer in /usr/local (KubeRay may start a login shell, which
#                sets PATH anew: a virtual environment elsewhere would not be found)
#   TORCH_INDEX  package index to take torch alone from, e.g. that of its CPU builds; empty: pip's own
#   EXTRAS       extras of pyproject.toml besides redis, separated by spaces, e.g. gpu
#   CUDA_BASE    an image with nvcc, for the FlashInfer kernels of the stage `gpu`
#   CUDA_ARCHS   compute capabilities that these kernels are for: 8.0 A100, 8.9 L40S, 9.0a H100 and H200,
#                10.0a B200; several are separated by spaces. Another GPU is refused at the start
#   KERNELS      which kernels: options of scripts/build_kernels.py
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
FROM ${BASE} AS packages

# wget and bash: the health probes that KubeRay puts into the pods.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home manta

WORKDIR /opt/manta
ENV PYTHONPATH=/opt/manta \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Dependencies in a layer of their own: a change of the sources doesn't install torch again.
# --no-deps keeps the second index out of everything but torch.
COPY pyproject.toml constraints.txt ./
ARG TORCH_INDEX=""
RUN if [ -n "${TORCH_INDEX}" ]; then \
        pip install --no-deps --index-url "${TORCH_INDEX}" -c constraints.txt torch; \
    fi
ARG EXTRAS=""
RUN python -c "import sys, tomllib; \
p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [line for name in sys.argv[1:] for line in p['optional-dependencies'][name]]; \
print('\n'.join(p['dependencies'] + extras))" redis ${EXTRAS} > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

# The CPU kernels: compiled in a stage of its own, so that the image has no compiler.
FROM packages AS kernels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# No more of engine/ than the build needs: another change there doesn't compile anew.
COPY engine/errors.py engine/
COPY engine/process/folders.py engine/process/
COPY engine/csrc engine/csrc
COPY engine/native engine/native
RUN mkdir -p engine/native/lib && python -m engine.native.build --into engine/native/lib

# What is in the image, as CycloneDX: Python's packages, and Debian's in a file beside it. The tool itself
# isn't part of it.
FROM packages AS sbom
RUN python -m venv /tmp/tool && /tmp/tool/bin/pip install -c constraints.txt cyclonedx-bom \
    && /tmp/tool/bin/cyclonedx-py environment --of JSON --output-file sbom.json "$(command -v python)" \
    && dpkg-query --show > sbom-debian.txt

FROM packages AS cpu
COPY LICENSE serve_app.py ./
COPY engine engine
COPY --from=kernels /opt/manta/engine/native/lib engine/native/lib
COPY --from=sbom /opt/manta/sbom.json /opt/manta/sbom-debian.txt ./
COPY deploy deploy
COPY benchmarks/load benchmarks/load
COPY configs configs
COPY models models
RUN python -m compileall -q engine deploy benchmarks serve_app.py

# HAProxy in place of Serve's Python proxy, through a wrapper: without it HAProxy doesn't notice clients
# that leave, and opens its pages to the network. The others as deploy/start/launch.py sets them.
ENV RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/manta/deploy/start/haproxy-wrapper \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deploy.http.header_guard:middlewares \
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0 \
    OMP_WAIT_POLICY=PASSIVE \
    RAY_worker_niceness=0

USER 1000:1000
EXPOSE 8000
# KubeRay starts Ray instead and hands it the application.
CMD ["python", "-m", "deploy.launch", "configs/llama.yaml", "--host", "0.0.0.0", "--set", "auth=none", "--verbose"]

# For GPUs: FlashInfer's kernels for all that the configuration offers (heads of 64, 128 and 256, float8 KV
# caches, sliding windows, FlashAttention 3), compiled without a GPU. By estimate an hour and a half on
# 2 cores, and as much again for each more of CUDA_ARCHS. --build-arg EXTRAS=gpu --target gpu
FROM ${CUDA_BASE} AS cuda
FROM packages AS flashinfer
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ENV CUDA_HOME=/usr/local/cuda
COPY scripts/build_kernels.py scripts/
COPY engine/errors.py engine/
COPY engine/device/flashinfer_loader.py engine/device/flashinfer_modules.py engine/device/
ARG CUDA_ARCHS="9.0a"
ARG KERNELS="--head-dim 64 128 256 --dtype bfloat16 float16 --fp8 --windows --fa3"
RUN python scripts/build_kernels.py --out /aot --arch ${CUDA_ARCHS} ${KERNELS}

FROM cpu AS gpu
USER 0
# Triton compiles its kernels itself, but their launchers with a C compiler, at their first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=flashinfer /aot /tmp/aot
RUN python -c "import importlib.util as u, shutil; \
f = u.find_spec('flashinfer').submodule_search_locations[0]; \
shutil.copytree('/tmp/aot', f + '/data/aot', dirs_exist_ok=True)" && rm -r /tmp/aot
# A missing module is an error: there is no CUDA compiler in the image.
ENV FLASHINFER_DISABLE_JIT=1
USER 1000:1000

# The default
FROM cpu
