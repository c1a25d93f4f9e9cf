"""What training on several devices sends between them, by dtype, compiled for absent chips."""
