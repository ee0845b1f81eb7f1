"""Direct preference optimisation of flow models on pairs of pictures."""
