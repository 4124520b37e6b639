"""JetStream's orchestrator and gRPC server over the paged engine; optional, needs `jrl[jetstream]` and google-jetstream."""
