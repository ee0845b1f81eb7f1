"""Pure functions: tensors in, tensors out; docs/mathematics.md has the formulas and their sources."""
