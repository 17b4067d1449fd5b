"""The ops of JAX that can be measured."""
