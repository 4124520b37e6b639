# Not run by its authors as yet: they had no registry to build from, and no AMD GPU.
#
#   docker build -f jrl/launch/rocm.Dockerfile -t jrl:rocm .
#   docker run --device=/dev/kfd --device=/dev/dri --group-add=video --ipc=host --security-opt=seccomp=unconfined \
#       -v /shared:/shared jrl:rocm --config=configs/gsm8k_grpo.py --config.run_dir=/shared/runs/gsm8k
#
# On several hosts, besides: --network=host, and -e of the three variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
# JAX_PROCESS_ID. (--device: the driver's compute and render nodes. --ipc=host: RCCL shares memory between GPUs through /dev/shm.)
#
# JAX's ROCm wheels bring the plugin alone, so the base image has ROCm's libraries; its version, 7, is that of the plugin.
ARG ROCM=7.2-complete
FROM rocm/dev-ubuntu-24.04:${ROCM}

RUN apt-get update && apt-get install -y --no-install-recommends git python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /jrl
COPY . .
RUN pip install --no-cache-dir -e '.[rocm,data,rewards,serve]'

# The share of each GPU's memory that JAX takes at the start; the rest is for RCCL's buffers and hipBLASLt.
ENV XLA_CLIENT_MEM_FRACTION=0.9
# Communication runs while matrices are multiplied.
ENV XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true
# RCCL reads NCCL's variables; INFO says which network it has chosen.
ENV NCCL_DEBUG=WARN
# Where the plugin looks for ROCm.
ENV ROCM_PATH=/opt/rocm
# Compiled programs; mount a volume here, and a restart compiles nothing.
ENV JAX_COMPILATION_CACHE_DIR=/root/.cache/jax

ENTRYPOINT ["python", "-m", "jrl.main"]
