"""Pipeline parallelism: a model's blocks are cut into stages, which ranks run by a schedule."""
