"""Kernels of the optimizers, and the reduction of gradients in fp32."""
