"""Services for steps: CUDA graphs, memory, compiling ahead, recomputation, traces, backends."""
