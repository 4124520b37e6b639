"""Where arrays are kept: memory kinds of JAX, and values of the config. It needs no jax, so that configs are checked first."""

DEVICE, HOST = "device", "pinned_host"
