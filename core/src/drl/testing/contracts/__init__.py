"""One test class per kind; a plugin passes when its subclasses pass."""
