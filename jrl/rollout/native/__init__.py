"""Decoding on a CPU by kernels of our own (`kernels.cc`), compiled where they run; `jrl.rollout.cpu_backend` uses them."""
