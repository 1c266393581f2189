"""What steps run on: graphs, memory, kernels compiled ahead, names in traces, choice of kernels."""
