# GraniKV on Triton Inference Server with TensorRT-LLM. The plugin is built inside the image, against
# its TensorRT and CUDA headers; every other step is a script of build_scripts/container.
#
#   docker build -t granikv --build-arg PLUGIN_ARCH=90 --build-arg PLUGIN_MODELS=llama-3.1-8b .
#   docker run --gpus all --shm-size 1g -p 8000-8002:8000-8002 -v DIR:/models granikv --model /models/NAME

ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

FROM ${TRITON_IMAGE} AS plugin
# compute capabilities, models, tensor-parallel sizes and types of the kernels; "all" takes hours
ARG PLUGIN_ARCH=80,90
ARG PLUGIN_MODELS=llama-3.1-8b
ARG PLUGIN_TP=all
ARG PLUGIN_ELEMENTS=bf16
ENV PREFIX=/opt/granikv
WORKDIR /src
COPY build_scripts ./build_scripts
COPY granikv ./granikv
COPY trtllm_plugin ./trtllm_plugin
RUN build_scripts/container/build_plugin.sh

FROM ${TRITON_IMAGE} AS server
ENV PREFIX=/opt/granikv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY build_scripts ./build_scripts
COPY granikv ./granikv
COPY trtllm_plugin ./trtllm_plugin
COPY model_repository ./model_repository
COPY --from=plugin /opt/granikv ./plugin
RUN build_scripts/container/install.sh && \
    build_scripts/container/check.sh && \
    build_scripts/container/add_user.sh 10001

USER 10001:10001
WORKDIR /home/granikv
EXPOSE 8000 8001 8002
# a start loads weights; afterwards the launcher itself restarts a server whose processes die
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "/opt/granikv/healthcheck.py"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["granikv", "serve", "--host", "0.0.0.0", "--model-repository", "/opt/granikv/model_repository"]
