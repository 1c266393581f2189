"""How a model is spread over ranks: meshes, plans, FSDP, dispatch. Models know nothing of it."""
