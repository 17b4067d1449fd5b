"""What JAX's ops offer to be measured."""
