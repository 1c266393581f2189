"""Expert parallelism: every rank holds some experts, and tokens travel to them."""
