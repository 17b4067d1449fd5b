"""A Hugging Face model as data: its spec, its weights by name, its families."""
