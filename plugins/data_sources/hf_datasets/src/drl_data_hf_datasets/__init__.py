"""Hugging Face data sets on disk as a data source for drl."""
