"""Files of tensors, read by parts: safetensors, torch, and the pieces that devices wrote."""
