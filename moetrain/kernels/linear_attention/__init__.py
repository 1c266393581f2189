"""Linear attention: token mixers whose state does not grow with the row."""
