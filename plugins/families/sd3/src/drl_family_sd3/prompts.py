"""Which embeddings of prompts are kept, where, and when the text encoders may go.

A record of Stable Diffusion 3.5 is 5.5 MB in float32. Those on the device are the latest; those on the CPU
have the encoders' precision, from which float32 comes back bit for bit.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from drl.api import BadInput, ConditionRecord
from drl.mathematics.feeding import DTYPES
from drl.mathematics.transfer import moved
from drl.model.moving import release_cached
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.text import TextEncoders

log = logging.getLogger(__name__)

LATEST_ON_DEVICE = 32
"""Records that stay on the device beside released encoders: a rollout asks for the same few again and again."""
STORED_SHARE = 0.5
"""Share of the machine's memory that records of known prompts may take."""


@dataclass
class PromptRecords:
    """Records by prompt. ``latest``: on the device, as handed out. ``stored``: on the CPU, in ``text_dtype``.

    ``known``: the prompts that were said to come; their records are never dropped. ``ahead``: encoders are
    not kept, because ``expect`` encoded what was known.
    """

    encoders: TextEncoders
    options: Sd3Options
    device: str
    latest: OrderedDict[str, ConditionRecord] = field(default_factory=OrderedDict)
    stored: OrderedDict[str, Mapping[str, torch.Tensor]] = field(default_factory=OrderedDict)
    known: frozenset[str] = frozenset()
    ahead: bool = False

    def encode(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        """Return one record per prompt, float32 on the device, each computed alone."""
        lacking = [
            p for p in dict.fromkeys(prompts) if p not in self.latest and p not in self.stored
        ]
        if self.ahead and lacking:
            self._store(lacking)
            log.warning(
                "%d of the prompts were not known at the start (the first: %r): the text encoders were "
                "loaded for them once more; model.sd3.text_encoders = 'resident' keeps them",
                len(lacking),
                lacking[0],
            )
        records = [self._record(prompt) for prompt in prompts]
        self._bound_stored()
        return records

    def expect(self, prompts: Sequence[str]) -> None:
        """Encode the prompts that will come and let go of the encoders, where that is asked for.

        BadInput when their records would take more than half of the machine's memory.
        """
        if self.options.text_encoders == "resident":
            return
        self.ahead = True
        self.known = self.known.union(prompts)
        lacking = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.stored]
        if lacking:
            self._store(lacking)

    def release(self) -> None:
        """Free the device's memory: records and encoders go to the CPU until they are asked for."""
        for prompt, record in self.latest.items():
            self._keep(prompt, record)
        self.latest.clear()
        self.encoders.release()
        self._bound_stored()

    def _record(self, prompt: str) -> ConditionRecord:
        record = self.latest.pop(prompt, None)
        if record is None:
            record = (
                self._uploaded(prompt) if prompt in self.stored else self.encoders.compute(prompt)
            )
        self.latest[prompt] = record
        room = min(LATEST_ON_DEVICE, self.options.prompt_cache)
        if len(self.latest) > (room if self.ahead else self.options.prompt_cache):
            self.latest.popitem(last=False)
        return record

    def _uploaded(self, prompt: str) -> ConditionRecord:
        tensors, device = self.stored[prompt], torch.device(self.device)
        if prompt not in self.known:
            self.stored.move_to_end(prompt)
        return ConditionRecord(
            tensors={name: moved(kept, device).float() for name, kept in tensors.items()}
        )

    def _store(self, prompts: Sequence[str]) -> None:
        """Compute and keep records on the CPU, then drop the encoders."""
        try:
            for done, prompt in enumerate(prompts):
                self._keep(prompt, self.encoders.compute(prompt))
                if done == 0:
                    self._check_room(prompt, len(prompts))
        finally:
            self.encoders.drop()
            release_cached(self.device)

    def _keep(self, prompt: str, record: ConditionRecord) -> None:
        if prompt not in self.stored:
            dtype = DTYPES[self.options.text_dtype]
            self.stored[prompt] = {
                name: tensor.to("cpu", dtype) for name, tensor in record.tensors.items()
            }

    def _check_room(self, prompt: str, count: int) -> None:
        each = sum(tensor.nbytes for tensor in self.stored[prompt].values())
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if count * each > STORED_SHARE * memory:
            raise BadInput(
                f"model.sd3.text_encoders = 'released': the records of {count} prompts take "
                f"{count * each / 2**30:.1f} GiB, more than half of this machine's "
                f"{memory / 2**30:.1f} GiB; use 'resident', fewer prompts, or text_dtype = 'bf16'"
            )

    def _bound_stored(self) -> None:
        """Forget the oldest records of prompts that nobody announced, beyond ``prompt_cache``."""
        unknown = [prompt for prompt in self.stored if prompt not in self.known]
        for prompt in unknown[: max(0, len(unknown) - self.options.prompt_cache)]:
            del self.stored[prompt]
