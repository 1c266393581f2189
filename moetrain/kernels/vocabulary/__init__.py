"""The vocabulary matrix: losses and sampled tokens without storing logits."""
