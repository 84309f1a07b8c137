"""The SDK of a training pod."""
