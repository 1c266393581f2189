"""Services to steps: CUDA graphs, memory, compilation ahead, names in traces, backends."""
