"""Reference and old policy with a real adapter: no dropout, no gradient, and the KL term worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.catalog import Catalog
from drl.interfaces.family import Family, Route
from drl.interfaces.loss import Loss
from drl.lora import LoraConfig, adapter_off, inject
from drl.mathematics.noising import noised
from drl.model.ema import Ema, EmaSettings, build_reference
from drl.stages.loss import Forward, PolicyContext, loss_of
from drl.testing import make_pair
from drl.types import (
    VISUAL,
    Condition,
    Context,
    ForwardInputs,
    Guidance,
    LossOutput,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    StepContext,
)


class Toy(SimpleNamespace):
    """A family by its functions; guidance is as in all families."""

    conditions = Family.conditions
    predict = Family.predict


FAMILY = Toy(
    condition=lambda record: Condition(arguments={}),
    collate=lambda rows: Condition(arguments={}, rows=len(rows)),
    route=lambda timestep: Route(),
    model_time=lambda sigma_B, timestep_B: 1000 * sigma_B,
    forward=lambda model, streams, time_B, condition: {VISUAL: model(streams[VISUAL])},
)


class Net(nn.Module):
    """Two matrices with a dropout of their own between them, as some text branches have."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.first(x)))
        return output


def adapted(dropout: float = 0.5) -> Net:
    """A net with adapters that do something already; dropout in them and in the net."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(dropout)
    net.requires_grad_(False)
    config = LoraConfig(rank=2, alpha=4, target_modules=("first", "last"), dropout=dropout)
    inject(net, config, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return net.train()


class Kept(Loss):
    """Hands over what it is given."""

    def expand(self, unit: Any, advantages: Any, context: StepContext) -> list[Pair]:
        raise NotImplementedError

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        return ForwardInputs(streams={VISUAL: pairs.tensors[VISUAL]})

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        self.predictions = predictions
        return LossOutput(loss=predictions.trained[VISUAL].sum(), metrics={})


def forward_of(net: nn.Module, loss: Loss, **changes: Any) -> Forward:
    values: dict[str, Any] = {
        "family": FAMILY,
        "models": {"transformer": net},
        "loss": loss,
        "backend": None,
        "device": torch.device("cpu"),
        "dtype": "fp32",
        "guidance": {"guidance_scale": Guidance()},
    }
    return Forward(**(values | changes))


def pairs_of(count: int = 3, **values: float) -> list[Pair]:
    known = {"sigma_next": 0.5, "sigma_max": 0.9, "log_prob_old": -1.0, "step": 1.0}
    return [
        make_pair(id=(n, 1), unit=n, seed=n, sigma=0.75, values=known | values)
        for n in range(count)
    ]


def policies(net: Net) -> dict[str, PolicyContext]:
    """The two references of a recipe; the average is of weights that have moved since."""
    parameters = {f"transformer.{name}": p for name, p in net.named_parameters() if p.requires_grad}
    ema = Ema(parameters, EmaSettings(), models=(net,))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.05)
    return {mode: build_reference(mode, {"transformer": net}, ema) for mode in ("lora_base", "ema")}


@pytest.mark.parametrize("mode", ["lora_base", "ema"])
@pytest.mark.parametrize("role", ["reference", "old"])
def test_dropout_is_off_in_the_reference_and_on_in_the_trained_forward(
    mode: str, role: str
) -> None:
    net, pairs = adapted(), pairs_of()
    policy = policies(net)[mode]
    found, trained = [], []
    for seed in (1, 2):
        loss = Kept(None, Context())
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = loss_of(forward_of(net, loss, **{role: policy}), pairs, StepContext())
        other = {"reference": loss.predictions.reference, "old": loss.predictions.old}[role]
        assert other is not None
        assert not other[VISUAL].requires_grad
        found.append(other[VISUAL])
        trained.append(loss.predictions.trained[VISUAL].detach())
        output.loss.backward()
    assert torch.equal(*found)
    assert not torch.equal(*trained)
    net.eval()
    with torch.no_grad(), policy("transformer"):
        rows = torch.stack([pair.tensors[VISUAL] for pair in pairs])
        assert torch.equal(net(rows), found[0])
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_the_base_without_its_adapter_is_the_model_of_before() -> None:
    net, loss = adapted(), Kept(None, Context())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Net(0.5).eval()
    policy = policies(net)["lora_base"]
    loss_of(forward_of(net, loss, reference=policy), pairs_of(), StepContext())
    assert loss.predictions.reference is not None
    rows = torch.stack([pair.tensors[VISUAL] for pair in pairs_of()])
    assert torch.equal(loss.predictions.reference[VISUAL], plain(rows))


def test_a_reference_that_fails_leaves_the_model_training() -> None:
    net = adapted()

    @contextmanager
    def broken(component: str) -> Iterator[None]:
        with adapter_off(net):
            yield
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        loss_of(forward_of(net, Kept(None, Context()), reference=broken), pairs_of(), StepContext())
    assert all(module.training for module in net.modules())
    hosts = [module for module in net.modules() if type(module).__name__ == "LoraLinear"]
    assert len(hosts) == 2
    assert all(host.active for host in hosts)


def test_a_model_in_evaluation_mode_stays_in_it() -> None:
    net = adapted().eval()
    policy = policies(net)["ema"]
    loss_of(forward_of(net, Kept(None, Context()), reference=policy), pairs_of(), StepContext())
    assert not any(module.training for module in net.modules())


def made(catalog: Catalog, kind: str, name: str, options: Any = None, **section: Any) -> Any:
    if name not in catalog.names(kind):
        pytest.skip(f"no {kind} {name!r} is installed")
    model = catalog.options_model(kind, name)
    options = options if options is not None or model is None else model()
    return catalog.create(kind, name, options, Context(section=SimpleNamespace(**section)))


def loss_by_name(catalog: Catalog, name: str, beta: float) -> Loss:
    loss: Loss = made(catalog, "loss", name, kl_beta=beta, adv_clip_max=5.0, ref_mode="lora_base")
    return loss


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.load()


def row_means(difference: Tensor) -> Tensor:
    return difference.square().flatten(1).mean(1)


def of_policy_loss(catalog: Catalog, net: Net, pairs: list[Pair]) -> float:
    """``mean((mu - mu_ref)^2) / (2 std_dev_t^2)``: the mean moves by ``slope dt`` times the velocity."""
    rows = torch.stack([pair.tensors[VISUAL] for pair in pairs])
    with torch.no_grad(), adapter_off(net):
        base = net(rows)
    scale = 0.7 * math.sqrt(0.75 / 0.25)
    slope = -0.25 * (1 + scale**2 * 0.25 / (2 * 0.75))
    distance = row_means(slope * (net(rows) - base)).mean().item()
    return distance / (2 * scale**2)


def of_nft(catalog: Catalog, net: Net, pairs: list[Pair]) -> float:
    """``mean((v - v_ref)^2)`` at the noised latents."""
    rows = torch.stack([pair.tensors[VISUAL] for pair in pairs])
    noise = torch.stack(
        [
            torch.randn(rows[0].shape, generator=StepContext().generator("nft_noise", *pair.id))
            for pair in pairs
        ]
    )
    rows = noised(rows, noise, torch.full((len(pairs),), 0.75))
    with torch.no_grad(), adapter_off(net):
        base = net(rows)
    return row_means(net(rows) - base).mean().item()


Expected = Callable[[Catalog, Net, list[Pair]], float]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("policy_loss", {"advantage": 0.0}, of_policy_loss),
        ("nft", {"advantage": 0.0, "levels": 4.0}, of_nft),
    ],
)
def test_the_kl_term_measures_the_distance_to_the_base(
    catalog: Catalog, name: str, values: dict[str, float], expected: Expected
) -> None:
    net, pairs = adapted(dropout=0.0), pairs_of(**values)
    loss = loss_by_name(catalog, name, 0.1)
    backend = made(catalog, "sde_backend", "sde", noise_level=0.7, log_prob_no_const=False)
    policy = build_reference("lora_base", {"transformer": net}, None)
    forward = forward_of(net, loss, backend=backend, reference=policy, old=policies(net)["ema"])
    output = loss_of(forward, pairs, StepContext())
    metric = output.metrics["kl_loss"]
    found = float(metric.total / metric.count)
    assert found == pytest.approx(expected(catalog, net, pairs), rel=1e-4)
    plain = loss_of(
        forward_of(net, loss_by_name(catalog, name, 0.0), backend=backend, old=forward.old),
        pairs,
        StepContext(),
    )
    assert float(output.loss.detach()) == pytest.approx(
        float(plain.loss.detach()) + 3 * 0.1 * found, rel=1e-4
    )


@pytest.mark.parametrize("name", ["policy_loss", "nft"])
def test_the_kl_term_alone_pulls_back_to_the_base(catalog: Catalog, name: str) -> None:
    """Without advantages, gradient steps on the KL bring the adapted model back to the base."""
    net = adapted(dropout=0.0)
    pairs = pairs_of(advantage=0.0, levels=4.0)
    loss = loss_by_name(catalog, name, 1.0)
    backend = made(catalog, "sde_backend", "sde", noise_level=0.7, log_prob_no_const=False)
    policy = build_reference("lora_base", {"transformer": net}, None)
    forward = forward_of(net, loss, backend=backend, reference=policy, old=policy)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.03)
    distances = []
    for _ in range(25):
        optimizer.zero_grad()
        output = loss_of(forward, pairs, StepContext())
        distances.append(float(output.metrics["kl_loss"].total))
        output.loss.backward()
        optimizer.step()
    assert distances[-1] < 0.1 * distances[0]


@pytest.mark.parametrize("name", ["policy_loss", "grpo_guard", "nft", "awm"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_advantage_beyond_the_limit_counts_as_the_limit(
    catalog: Catalog, name: str, sign: float
) -> None:
    """Every loss clamps by ``algorithm.adv_clip_max`` itself; estimators leave advantages as they are."""
    net = adapted(dropout=0.0)
    backend = made(catalog, "sde_backend", "sde", noise_level=0.7, log_prob_no_const=False)

    def loss_at(advantage: float, limit: float) -> float:
        loss = made(catalog, "loss", name, kl_beta=0.0, adv_clip_max=limit, ref_mode="none")
        pairs = pairs_of(advantage=sign * advantage, levels=4.0)
        old = build_reference("lora_base", {"transformer": net}, None)
        output = loss_of(forward_of(net, loss, backend=backend, old=old), pairs, StepContext())
        return float(output.loss.detach())

    assert loss_at(5.0, 5.0) == loss_at(9.0, 5.0) == loss_at(1e4, 5.0)
    assert loss_at(4.0, 5.0) != loss_at(5.0, 5.0)
    assert loss_at(9.0, 10.0) != loss_at(9.0, 5.0)
