"""FSDP: sharded parameters, gathered in the compute dtype where they are used."""
