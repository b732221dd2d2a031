"""Optimizers that keep their state in other optimizers, for tests of all packages."""

from types import SimpleNamespace

import torch


class Contained(torch.optim.Optimizer):
    """Several optimizers as one, whose own state is empty and whose groups are theirs."""

    def __init__(self, *optimizers):
        super().__init__(
            [p for each in optimizers for group in each.param_groups for p in group["params"]], {}
        )
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


class WithLayout(Contained):
    """The same, with the states of its optimizers in its state dict."""

    def state_dict(self):
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state):
        for each, saved in zip(self.optimizers, state["optimizers"], strict=True):
            each.load_state_dict(saved)
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]


class Lookahead(torch.optim.Optimizer):
    """Slow weights in its own state, around another optimizer; a counter in the groups of both."""

    def __init__(self, optimizer):
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if group["counter"] % 4 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class Held(torch.optim.Optimizer):
    """Several optimizers in a place that `place(*optimizers)` makes: a set, a namespace, bound methods."""

    def __init__(self, place, *optimizers):
        super().__init__(
            [p for each in optimizers for group in each.param_groups for p in group["params"]], {}
        )
        self.place, self.step_all = place(*optimizers), lambda: [each.step() for each in optimizers]

    def step(self, closure=None):
        self.step_all()


class Holder:
    """Plain object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


PLACES = {
    "namespace": lambda *each: SimpleNamespace(inner=each),
    "set": lambda *each: set(each),
    "object": lambda *each: Holder(inner=list(each)),
    "bound methods": lambda *each: [one.step for one in each],
}


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is in the attribute `momentum` only, from the first step on."""

    def __init__(self, parameters, place=dict):
        super().__init__(parameters, {"lr": 0.03})
        self.momentum = place()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                held = self.momentum if isinstance(self.momentum, dict) else vars(self.momentum)
                p.sub_(held.setdefault(str(id(p)), torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.03)


class SlowWeights:
    """Lookahead that is no torch optimizer, with its slow weights in a list."""

    def __init__(self, inner):
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @property
    def param_groups(self):
        return self.inner.param_groups

    @torch.no_grad()
    def step(self):
        self.inner.step()
        trained = [p for group in self.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, trained, strict=True):
            p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self):
        self.inner.zero_grad()


class CountsTheLast(torch.optim.Optimizer):
    """Mean of the gradients that is corrected by the number of updates of the last parameter of the group."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - group["momentum"])
            for p in trained:
                count = self.state[group["params"][-1]]["count"]
                p.sub_(self.state[p]["m"] / (1 - group["momentum"] ** count), alpha=group["lr"])
