"""Things to copy from."""
