"""A generator served over HTTP, in OpenAI's protocol."""
