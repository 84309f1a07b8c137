# The operator. From the repository's root: docker build -f docker/operator.Dockerfile -t operator .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY meshd meshd
COPY sdk sdk
COPY operator operator
RUN python -m venv /opt/mesh \
 && /opt/mesh/bin/pip install --no-cache-dir ".[operator]" \
 && find /opt/mesh -name __pycache__ -type d -prune -exec rm -rf {} +

FROM python:${PYTHON}
COPY --from=build /opt/mesh /opt/mesh
ENV PATH=/opt/mesh/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 9090 9443
STOPSIGNAL SIGTERM
ENTRYPOINT ["meshoperator"]
