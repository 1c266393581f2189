"""The optimizer: AdamW, its state, its updates on the host, and learning-rate schedules."""
