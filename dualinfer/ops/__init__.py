"""What the decoder computes with: the contract of ops, and what they mean, over any framework."""
