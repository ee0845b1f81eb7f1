"""drl: post-training of image and video diffusion transformers."""

__version__ = "0.1.0"
