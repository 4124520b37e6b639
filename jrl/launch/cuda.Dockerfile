# Not run by its authors as yet: they had no registry to build from, and no machine with several GPUs.
#
#   docker build -f jrl/launch/cuda.Dockerfile -t jrl:cuda .
#   docker run --gpus=all --ipc=host --ulimit memlock=-1 -v /shared:/shared jrl:cuda \
#       --config=configs/gsm8k_grpo.py --config.run_dir=/shared/runs/gsm8k
#
# On several hosts, besides: --network=host, --device=/dev/infiniband where there is InfiniBand, and -e of the three variables
# JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. (--ipc=host: NCCL shares memory between GPUs through /dev/shm, of
# which a container has 64 MB. --ulimit: InfiniBand wants memory that stays where it is.)
#
# CUDA, cuDNN and NCCL come with JAX's wheels; of the host only the driver is used.
FROM python:3.12-slim

# git: some packages ask for it; libibverbs and its providers: NCCL's way to InfiniBand.
RUN apt-get update && apt-get install -y --no-install-recommends git ibverbs-providers libibverbs1 && rm -rf /var/lib/apt/lists/*
WORKDIR /jrl
COPY . .
RUN pip install --no-cache-dir -e '.[cuda,data,rewards,serve]'

# The share of each GPU's memory that JAX takes at the start; the rest is for NCCL's buffers and cuBLAS.
ENV XLA_CLIENT_MEM_FRACTION=0.9
# Communication runs while matrices are multiplied.
ENV XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true
# NCCL says what is wrong with it, and nothing else; INFO says which network it has chosen.
ENV NCCL_DEBUG=WARN
# Which devices and functions of the driver the container sees.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Compiled programs; mount a volume here, and a restart compiles nothing.
ENV JAX_COMPILATION_CACHE_DIR=/root/.cache/jax

ENTRYPOINT ["python", "-m", "jrl.main"]
