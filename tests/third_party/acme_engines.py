"""A third-party plugin of engines that are not what they should be; each is named for its fault."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)

FAULTS = {
    "acme_slow": "Slow",
    "acme_hanging": "Hanging",
    "acme_failing": "Failing",
    "acme_crashing": "Crashing",
    "acme_other_shift": "OtherShift",
    "acme_other_guidance": "OtherGuidance",
    "acme_other_window": "OtherWindow",
    "acme_other_weights": "OtherWeights",
    "acme_silent": "Silent",
    "acme_wrong_seed": "WrongSeed",
    "acme_wrong_size": "WrongSize",
    "acme_wrong_version": "WrongVersion",
    "acme_wrong_member": "WrongMember",
    "acme_one_short": "OneShort",
    "acme_deaf": "Deaf",
    "acme_renaming": "Renaming",
    "acme_dropping": "Dropping",
    "acme_adding": "Adding",
    "acme_reshaping": "Reshaping",
    "acme_damaging": "Damaging",
    "acme_counting": "Counting",
}


@hookimpl
def drl_register_engines():
    return [
        Component(
            name,
            f"acme_engines_{'updates' if target in UPDATES else 'samples'}:{target}",
            summary="An engine with a fault.",
            config="drl_engine_local.config:LocalOptions",
        )
        for name, target in FAULTS.items()
    ]


UPDATES = {"Deaf", "Renaming", "Dropping", "Adding", "Reshaping", "Damaging", "Counting"}
