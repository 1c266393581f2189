"""Training: the engine, its objectives, and the loop of pretraining and fine-tuning."""
