"""Training data: read, recognised, checked, encoded and reported on. Pure Python at import."""
