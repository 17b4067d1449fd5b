"""GGUF files: their tensors, config and tokenizer as Hugging Face has them."""
