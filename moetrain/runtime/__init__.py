"""What steps run on: CUDA graphs, memory, compilation ahead, names in traces, backends."""
