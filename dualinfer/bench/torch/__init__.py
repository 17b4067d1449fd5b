"""What torch's ops offer to be measured."""
