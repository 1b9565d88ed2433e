"""Models of other libraries in, and models for other libraries out."""
