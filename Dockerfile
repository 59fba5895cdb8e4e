# Image for docker run and for k8s/. How to build it for CPU and for GPU: k8s/README.md
#   BASE         must carry Python 3.11 or newer in /usr/local (KubeRay may start a login shell, which
#                sets PATH anew: a virtual environment elsewhere would not be found)
#   TORCH_INDEX  package index to take torch alone from, e.g. that of its CPU builds; empty: pip's own
#   EXTRAS       extras of pyproject.toml, separated by spaces, e.g. gpu
ARG BASE=python:3.11-slim-bookworm
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
print('\n'.join(p['dependencies'] + extras))" ${EXTRAS} > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

# The CPU kernels: compiled in a stage of its own, so that the image has no compiler.
FROM packages AS kernels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# No more of engine/ than the build needs: another change there doesn't compile anew.
COPY engine/errors.py engine/
COPY engine/csrc engine/csrc
COPY engine/native engine/native
RUN mkdir -p engine/native/lib && python -m engine.native.build --into engine/native/lib

FROM packages
COPY LICENSE serve_app.py ./
COPY engine engine
COPY --from=kernels /opt/manta/engine/native/lib engine/native/lib
COPY deploy deploy
COPY configs configs
COPY models models
RUN python -m compileall -q engine deploy serve_app.py

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
