"""Runs steps: CUDA graphs, memory, kernels compiled ahead, names in traces, choice of backends."""
