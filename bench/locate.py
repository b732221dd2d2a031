"""`python -m bench.locate`: whether a fault in any module is located in that very module.

Racks with every kind of attention, and models of others. In each module that a training step calls, one
element of the output becomes NaN or +inf, or the whole output ten times what it is; and the same of the
gradient on its way back through the module. What is exploding is judged by three steps on other batches
than the broken one. The name, the direction and the kind have to be right.

A NaN or infinity that reaches neither loss nor gradients breaks nothing. Such faults are counted apart:
there, to name the module and to name nothing are both right.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import third_party
from bench.claim import Bar, Claim
from bench.isolated import all_isolated
from stackwise import create_simple_rack
from stackwise.stability.locate import Location, ModuleScales, locate
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded

SECONDS = 900.0  # of one subject
RACK = {"d_model": 32, "d_ff": 48, "n_heads": 4, "vocab_size": 61}
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "grouped": {"n_kv_heads": 2},
    "one kv head": {"attention_type": "mqa", "n_kv_heads": 1},
    "latent": {"attention_type": "mla"},
    "window": {"sliding_window": 5},
    "bidirectional": {"attention_mode": "bidirectional"},
    "kernel favor": {"attention_type": "kernel", "kernel": {"feature_map": "favor"}},
    "kernel gaussian": {"attention_type": "kernel", "kernel": {"feature_map": "gaussian"}},
    "kernel laplacian": {"attention_type": "kernel", "kernel": {"feature_map": "laplacian"}},
    "kernel elu": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
    "normed heads": {"qk_norm": "head"},
    "normed width, post-norm": {"qk_norm": "width", "norm_position": "post", "norm": "layernorm"},
    "soft-capped": {"softcap": 20.0},
    "dropout, untied": {"dropout": 0.1, "tie_embeddings": False},
}
OTHERS = (
    *("transformers/llama", "transformers/gpt2", "transformers/gemma2", "transformers/mixtral"),
    *("transformers/opt", "transformers/gpt_neox", "transformers/mamba", "transformers/bert is_decoder"),
    *("x-transformers/decoder plain", "x-transformers/decoder rotary", "x-transformers/encoder"),
    *("torch/TransformerEncoder", "torch/GRU", "torch/LSTM"),
)
QUICK = ("rack/full", "rack/kernel favor", "transformers/llama", "x-transformers/decoder plain", "torch/GRU")
KINDS = ("nan", "inf", "x10")
DIRECTIONS = ("forward", "backward")


class _Bent(torch.autograd.Function):
    """Itself, with a gradient that `bend` has changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bend: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.bend = bend
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.bend(gradients[0]), None


class Fault:
    """A hook that breaks what a module gives, forward or backward, and says whether it has."""

    def __init__(self, direction: str, kind: str) -> None:
        self.direction, self.kind, self.acted = direction, kind, False

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return self._first(output)

    def _first(self, output: Any) -> Any:
        """The output with its first tensor broken; None: it has none that can be reached."""
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            if self.direction == "forward":
                return self._broken(output)
            return _Bent.apply(output, self._broken) if output.requires_grad else None  # type: ignore[no-untyped-call]
        if isinstance(output, tuple) and output:
            items = (self._first(output[0]), *output[1:])
            if items[0] is not None:
                return type(output)(*items) if hasattr(output, "_fields") else items
        if isinstance(output, dict) and output:
            name = next(iter(output))
            if (item := self._first(output[name])) is not None:
                output[name] = item
                return output
        return None

    def _broken(self, tensor: Tensor) -> Tensor:
        self.acted = True
        if self.kind == "x10":
            return tensor * 10.0
        tensor = tensor.clone()
        tensor[(0,) * tensor.ndim] = math.nan if self.kind == "nan" else math.inf
        return tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few subjects, another file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="subjects asked at a time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of this process, which is forked for each subject
    claim = Claim("locate", arguments.quick)
    claim.figures |= {"versions": third_party.versions(), "subjects": {}}
    chosen = subjects()
    if arguments.quick:
        chosen = {name: chosen[name] for name in QUICK}
    calls = {name: partial(answers, make) for name, make in chosen.items()}
    for name, ended in all_isolated(calls, jobs=arguments.jobs, seconds=SECONDS):
        claim.figures["subjects"][name] = summary(ended.values, ended.error) | {
            "seconds": round(ended.seconds, 1)
        }
        print(name, {k: v for k, v in claim.figures["subjects"][name].items() if k != "wrong"})
        claim.write()
    for bar in bars(claim.figures["subjects"]):
        claim.enter(bar)
    return claim.conclude()


def subjects() -> dict[str, Callable[[], Any]]:
    """Each by name; a value makes the factory, and may raise where the model cannot be built here."""
    racks = {
        f"rack/{name}": partial(
            _factory, create_simple_rack, n_stacks=2, blocks_per_stack=2, **RACK, **options
        )
        for name, options in ATTENTION.items()
    }
    others = {name: make for name, make in third_party.subjects() if name in OTHERS}
    return racks | {
        name: make if name.startswith("transformers/") else partial(_factory, make)
        for name, make in others.items()
    }


def _factory(make: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return partial(make, **options)


def answers(make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """One for each fault, after what was said of sound steps."""
    spec = ModelSpec.of(make())
    model = spec.create(torch.device("cpu"), 0).train()

    def step(batch: int, losses: list[Tensor] | None = None) -> None:
        model.zero_grad()
        with seeded(batch):
            loss = spec.loss_of(model, spec.batch(4, 12, device=torch.device("cpu"), seed=batch))
            if losses is not None:
                losses.append(loss.detach())
            loss.backward()  # type: ignore[no-untyped-call]

    names: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: names.append(name))
        for name, module in model.named_modules()
    ]
    step(0)
    for handle in handles:
        handle.remove()
    scales = ModuleScales.observe(model, *(partial(step, batch) for batch in (1, 2, 3)))
    for batch in (0, 4, 5):
        yield {"sound": True, "found": _plain(locate(model, partial(step, batch), scales=scales))}
    for name in dict.fromkeys(names):
        module = model.get_submodule(name)
        for direction in DIRECTIONS:
            for kind in KINDS:
                fault = Fault(direction, kind)
                handle = module.register_forward_hook(fault, prepend=True)
                losses: list[Tensor] = []
                try:
                    found = locate(model, partial(step, 0, losses), scales=scales if kind == "x10" else None)
                finally:
                    handle.remove()
                if fault.acted:
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    finite = all(bool(t.isfinite().all()) for t in (*losses, *gradients))
                    yield {
                        "sound": False,
                        "fault": [name or "(outside the submodules)", direction, kind],
                        "harmless": finite and kind != "x10",
                        "found": _plain(found),
                    }


def _plain(location: Location | None) -> dict[str, Any] | None:
    if location is None:
        return None
    return {"module": location.module, "direction": location.direction, "kind": location.kind}


def summary(values: list[Mapping[str, Any]], error: str | None) -> dict[str, Any]:
    """Of the answers about one subject."""
    faults = [value for value in values if not value["sound"]]
    exact = [value for value in faults if _is_exact(value)]
    harmless = [value for value in faults if value["harmless"]]
    wrong = [v for v in faults if not _is_exact(v) and not (v["harmless"] and v["found"] is None)]
    return {
        "modules": len({value["fault"][0] for value in faults}),
        "faults": len(faults),
        "exact": len(exact),
        "harmless": len(harmless),
        "harmless_unnamed": sum(value["found"] is None for value in harmless),
        "wrong": [{"fault": value["fault"], "found": value["found"]} for value in wrong],
        "named_at_sound_steps": [v["found"] for v in values if v["sound"] and v["found"] is not None],
        "error": error,
    }


def _is_exact(value: Mapping[str, Any]) -> bool:
    name, direction, kind = value["fault"]
    right = {
        "module": name,
        "direction": direction,
        "kind": "exploding" if kind == "x10" else "non-finite",
    }
    return bool(value["found"] == right)


def bars(found: Mapping[str, Mapping[str, Any]]) -> list[Bar]:
    """Of all subjects."""
    result = []
    for of_rack, label in ((True, "modules of the Rack"), (False, "modules of others")):
        chosen = [each for name, each in found.items() if name.startswith("rack/") == of_rack]
        faults = sum(each["faults"] - each["harmless_unnamed"] for each in chosen)
        wrong = sum(len(each["wrong"]) for each in chosen)
        result.append(Bar(f"exact names, {label}", (faults - wrong) / faults if faults else None, 1.0))
    others = sum(not name.startswith("rack/") and each["faults"] > 0 for name, each in found.items())
    unfinished = sum(each["error"] is not None for each in found.values())
    sound = sum(len(each["named_at_sound_steps"]) for each in found.values())
    result.append(Bar("models of others", float(others), 3.0, full_size=True))
    result.append(Bar("subjects that did not finish", float(unfinished), 0.0, at_most=True))
    result.append(Bar("places named at sound steps", float(sound), 0.0, at_most=True))
    return result


if __name__ == "__main__":
    raise SystemExit(main())
