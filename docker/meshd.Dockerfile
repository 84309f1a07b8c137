# The daemon. From the repository's root: docker build -f docker/meshd.Dockerfile -t meshd .  (or `make images`)
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install -q -y --no-install-recommends gcc binutils && rm -rf /var/lib/apt/lists/*
# CycloneDX's list of what an environment has: a tool of the build, in an environment of its own.
RUN python -m venv /opt/bom && /opt/bom/bin/pip install -q --no-cache-dir cyclonedx-bom==7.5.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY meshd meshd
COPY sdk sdk
COPY operator operator
COPY tools tools
COPY docker/slim.py docker/stub_libraries.py docker/
# Uninstalled again: what only `Tokenizer.from_pretrained` and rich's coloured source code would import.
RUN python -m venv --without-pip /opt/mesh \
 && python -m pip --python /opt/mesh/bin/python install --no-cache-dir --no-compile ".[server,tracing]" ./tools \
 && python -m pip --python /opt/mesh/bin/python uninstall --yes \
    huggingface-hub hf-xet fsspec filelock tqdm httpx2 httpcore2 h11 anyio idna truststore \
    pygments markdown-it-py mdurl \
 && rm -r /opt/mesh/lib/python3.*/site-packages/meshoperator /opt/mesh/bin/meshoperator \
 && /opt/bom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/mesh/sbom.cdx.json /opt/mesh/bin/python \
 && python docker/stub_libraries.py /opt/mesh/lib/python3.*/site-packages \
 && python docker/slim.py packages /opt/mesh && rm -rf /opt/bom && python docker/slim.py python \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/mesh/lib /usr/local/lib

# A user with a name; a standard library that is compiled, because without every start compiles it anew.
FROM python:${PYTHON} AS root
COPY docker/slim.py /tmp/
RUN groupadd --gid 65532 mesh && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/lib/meshd --shell /usr/sbin/nologin mesh \
 && install -d -o 65532 -g 65532 /var/lib/meshd \
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
LABEL org.opencontainers.image.title="shardmesh meshd" \
      org.opencontainers.image.description="The daemon of a Shardmesh node: S3, storage, and the CPU work of training input" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
ENV PATH=/opt/mesh/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /var/lib/meshd
EXPOSE 9000
STOPSIGNAL SIGTERM
# For `docker run` as it is; Kubernetes has probes of its own. With TLS or another port: --health-cmd.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9000/-/ready', timeout=4)"]
ENTRYPOINT ["meshd"]
CMD ["serve", "--data-dir", "/var/lib/meshd", "--listen", "0.0.0.0:9000"]
