"""DiffusionNFT for drl."""
