"""Choose which products are quantized, and what that makes worth while around them."""
