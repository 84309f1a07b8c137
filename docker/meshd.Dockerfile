# The daemon. From the repository's root: docker build -f docker/meshd.Dockerfile -t meshd .
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY meshd meshd
COPY sdk sdk
COPY operator operator
COPY tools tools
RUN python -m venv --without-pip /opt/mesh \
 && python -m pip --python /opt/mesh/bin/python install --no-cache-dir --no-compile ".[server]" ./tools \
 && /opt/mesh/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/mesh/lib

FROM python:${PYTHON}
# A user with a name, and a standard library that is compiled: without, every start compiles it anew.
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /var/lib/meshd --shell /usr/sbin/nologin mesh \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python3.*/ -x '/(test|site-packages|idlelib|lib2to3)/'
COPY --from=build /opt/mesh /opt/mesh
ENV PATH=/opt/mesh/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN install -d -o 65532 -g 65532 /var/lib/meshd
USER 65532:65532
WORKDIR /var/lib/meshd
EXPOSE 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["meshd"]
CMD ["serve", "--data-dir", "/var/lib/meshd", "--listen", "0.0.0.0:9000"]
