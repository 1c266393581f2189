"""Pipeline parallelism: a model's blocks cut into stages, and who runs which of them when."""
