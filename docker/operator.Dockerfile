# The operator. From the repository's root: docker build -f docker/operator.Dockerfile -t operator .  (or `make images`)
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install -q -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
# CycloneDX's list of what an environment has: a tool of the build, in an environment of its own.
RUN python -m venv /opt/bom && /opt/bom/bin/pip install -q --no-cache-dir cyclonedx-bom==7.5.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY meshd meshd
COPY sdk sdk
COPY operator operator
COPY docker/slim.py docker/
# Of our packages the operator has itself and the wire contract; uninstalled again: what the others import.
RUN python -m venv --without-pip /opt/mesh \
 && python -m pip --python /opt/mesh/bin/python install --no-cache-dir --no-compile ".[operator]" \
 && python -m pip --python /opt/mesh/bin/python uninstall --yes awscrt zlib-ng click rich pygments markdown-it-py mdurl \
 && rm -r /opt/mesh/lib/python3.*/site-packages/meshd /opt/mesh/lib/python3.*/site-packages/meshsdk \
    /opt/mesh/lib/python3.*/site-packages/meshdemo \
    /opt/mesh/bin/meshd /opt/mesh/bin/mesh \
 && /opt/bom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/mesh/sbom.cdx.json /opt/mesh/bin/python \
 && python docker/slim.py packages /opt/mesh && rm -rf /opt/bom && python docker/slim.py python \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/mesh/lib /usr/local/lib

# A user with a name; a standard library that is compiled, because without every start compiles it anew.
FROM python:${PYTHON} AS root
COPY docker/slim.py /tmp/
RUN groupadd --gid 65532 mesh && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin mesh \
 && python /tmp/slim.py system && rm -rf /usr/local/lib /usr/local/bin
COPY --from=build /usr/local /usr/local
COPY --from=build /opt/mesh /opt/mesh

# One layer without what was removed, instead of the base below it.
FROM scratch
# hadolint ignore=DL3067
COPY --from=root / /
ARG VERSION=0.1.0
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="shardmesh operator" \
      org.opencontainers.image.description="The Kubernetes operator of Shardmesh" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENV PATH=/opt/mesh/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 9090 9443
STOPSIGNAL SIGTERM
# No HEALTHCHECK: it runs on Kubernetes, whose probes the chart has.
ENTRYPOINT ["meshoperator"]
