# A server image. CPU:   docker build -t jserve .
#                 CUDA:  docker build -t jserve-cuda --build-arg EXTRA=[cuda13] .
#                 run:   docker run -p 8000:8000 jserve [MODEL] [options]     (with --gpus all for CUDA)
# The CUDA wheels of jax carry the libraries they need; the host brings the driver.
FROM python:3.12-slim

ARG EXTRA=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jserve jserve
COPY pallas_kernels pallas_kernels
COPY checkpoints checkpoints
RUN pip install --no-cache-dir ".${EXTRA}" && rm -rf /src/*

RUN useradd --create-home jserve
USER jserve
WORKDIR /home/jserve
# Compiled programs: keep this directory on a volume, and later starts find them.
VOLUME /home/jserve/.cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["jserve", "serve", "--host", "0.0.0.0"]
