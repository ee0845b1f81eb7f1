"""Declares the data source ``hf_dataset``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_data_sources() -> Sequence[Component]:
    """Offer data sets that ``save_to_disk`` wrote."""
    return [
        Component(
            "hf_dataset",
            "drl_data_hf_datasets.source:HfDatasetSource",
            summary="A Hugging Face data set on disk: images or videos with texts.",
            config="drl_data_hf_datasets.config:HfDatasetOptions",
        )
    ]
