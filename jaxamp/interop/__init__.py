"""Other libraries' objects: each module here is imported only where its library is already."""
