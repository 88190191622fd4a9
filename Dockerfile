# dmlkit serve on a CPU; compose.yaml runs it. Other commands: docker run --rm -v "$PWD:/data" dmlkit embed runs/birds photos
FROM python:3.12-slim AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY dmlkit dmlkit
COPY recipes recipes
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/dmlkit \
    && /opt/dmlkit/bin/pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
       '.[serve,lite]'

FROM python:3.12-slim
COPY --from=build /opt/dmlkit /opt/dmlkit
RUN useradd --create-home --uid 1000 dmlkit
USER 1000
WORKDIR /data
ENV PATH=/opt/dmlkit/bin:$PATH HOME=/tmp
EXPOSE 8765
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8765/healthz', timeout=4)"]
ENTRYPOINT ["dmlkit"]
CMD ["--help"]
