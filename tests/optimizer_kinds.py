"""Optimizers that keep their state in other optimizers, for tests of all packages."""

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
