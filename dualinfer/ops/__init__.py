"""The decoder's operations: their contract, and what they mean, over any framework."""
