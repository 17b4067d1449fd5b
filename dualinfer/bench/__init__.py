"""`dualinfer bench`: decode, prefill, forward and single ops, as fractions of the limit."""
