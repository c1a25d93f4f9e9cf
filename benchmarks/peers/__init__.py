"""jaxamp beside the other libraries for mixed precision, each in an environment of its own."""
