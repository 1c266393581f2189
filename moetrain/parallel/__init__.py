"""Spread a model over ranks: meshes, layouts, FSDP, dispatch, stages. Models know nothing of it."""
