"""The decoder's operations: the contract of ops, and what they mean, over any framework."""
