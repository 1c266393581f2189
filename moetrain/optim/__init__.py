"""The optimizer: AdamW, its learning-rate schedules, its state, and where its moments lie."""
