"""Decoding on a CPU by kernels of our own, in C++, compiled where they run.

`product.h`, `attention.h` and `sampling.h` are the kernels, `kernels.cc` their bindings, `ops.py` their faces as functions of
arrays, `library.py` compiles and loads them; `jrl.rollout.cpu_backend` is the backend that is made of them.
"""
