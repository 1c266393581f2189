"""Linear attention: token mixers with a state of fixed size."""
