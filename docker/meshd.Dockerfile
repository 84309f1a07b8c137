# The daemon. From the repository's root: docker build -f docker/meshd.Dockerfile -t meshd .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY meshd meshd
COPY sdk sdk
COPY operator operator
COPY tools tools
RUN python -m venv /opt/mesh \
 && /opt/mesh/bin/pip install --no-cache-dir ".[server]" ./tools \
 && find /opt/mesh -name __pycache__ -type d -prune -exec rm -rf {} +

FROM python:${PYTHON}
COPY --from=build /opt/mesh /opt/mesh
ENV PATH=/opt/mesh/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN install -d -o 65532 -g 65532 /var/lib/meshd
USER 65532:65532
WORKDIR /var/lib/meshd
EXPOSE 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["meshd"]
CMD ["serve", "--data-dir", "/var/lib/meshd", "--listen", "0.0.0.0:9000"]
