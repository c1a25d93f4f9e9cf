"""A program, with all nested jaxprs, as one flat graph that analyses sweep over."""
