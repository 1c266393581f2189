"""Kernels of the optimizer: the fused AdamW step, and the reduction of gradients in fp32."""
