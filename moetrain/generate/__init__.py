"""Generation by the trainer's own model: requests in, completions out."""
