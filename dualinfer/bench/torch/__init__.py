"""The ops of torch that can be measured."""
