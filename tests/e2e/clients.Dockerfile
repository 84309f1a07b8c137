# The daemon's image with boto3, for `python -m tests.e2e --client-image`: clients of S3 in pods.
#   docker build -f tests/e2e/clients.Dockerfile --build-arg MESHD=registry.example.com/shardmesh/meshd:0.1.0 -t e2e-clients .
ARG PYTHON=3.12-slim-bookworm
ARG MESHD
FROM python:${PYTHON} AS build
RUN python -m pip install -q --no-cache-dir --target /opt/clients boto3

FROM ${MESHD}
COPY --from=build /opt/clients /opt/clients
ENV PYTHONPATH=/opt/clients
