"""The files beside the weights: configs, tokenizers, how texts are embedded."""
