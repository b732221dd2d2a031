"""AgileRL#464 (AgileRL/AgileRL): the soft update of DQN never reaches the target network.

The target network receives detached tensors instead of parameters, so the update walks over an empty list
and the target keeps its first weights for the whole training.
"""

import torch
from torch import nn

import stackwise

STATES, ACTIONS = 60, 5


class QNetwork(nn.Module):
    """Values of all actions in a state that is a short row of symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(STATES, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.LayerNorm(48))
        self.head = nn.Linear(48, ACTIONS)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Values, one per action."""
        return self.head(self.encoder(self.symbols(obs).mean(1)))


def share_detached(source: nn.Module, target: nn.Module) -> None:
    """Give the target network the source's values as plain tensors."""
    for ours, theirs in zip(source.modules(), target.modules(), strict=True):
        for name, value in list(ours._parameters.items()):
            if value is not None:
                # Detached values stay out of the graph, which saves memory.
                del theirs._parameters[name]
                setattr(theirs, name, value.detach().clone())


class DQN:
    """Deep Q-learning on transitions with a softly updated target network."""

    def __init__(self, detached_target: bool, gamma: float = 0.99, tau: float = 0.01) -> None:
        self.actor = QNetwork()
        self.actor_target = QNetwork()
        if detached_target:
            share_detached(self.actor, self.actor_target)
        else:
            self.actor_target.load_state_dict(self.actor.state_dict())
            self.actor_target.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.gamma, self.tau = gamma, tau

    @property
    def model(self) -> QNetwork:
        """The network that learns."""
        return self.actor

    def loss(self, batch: dict) -> torch.Tensor:
        """Squared temporal-difference error."""
        with torch.no_grad():
            best = self.actor_target(batch["next_obs"]).max(1).values
            target = batch["reward"] + self.gamma * best * (1 - batch["done"])
        value = self.actor(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        return nn.functional.mse_loss(value, target)

    def step(self, batch: dict) -> float:
        """One update of the actor and then of its target."""
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.soft_update()
        return loss.item()

    @torch.no_grad()
    def soft_update(self) -> None:
        """Move the target network towards the actor."""
        for ours, theirs in zip(self.actor.parameters(), self.actor_target.parameters(), strict=False):
            theirs.copy_(self.tau * ours + (1.0 - self.tau) * theirs)


def make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> dict:
    """Random transitions."""
    return {
        "obs": torch.randint(STATES, (batch_size, seq_len), generator=generator),
        "action": torch.randint(ACTIONS, (batch_size,), generator=generator),
        "reward": torch.randn(batch_size, generator=generator),
        "next_obs": torch.randint(STATES, (batch_size, seq_len), generator=generator),
        "done": torch.randint(2, (batch_size,), generator=generator).float(),
    }


def _spec(detached_target: bool) -> stackwise.TrainerSpec:
    return stackwise.TrainerSpec.of(lambda: DQN(detached_target), make_batch=make_batch, vocab_size=STATES)


def buggy() -> stackwise.TrainerSpec:
    """A target network without parameters."""
    return _spec(detached_target=True)


def healthy() -> stackwise.TrainerSpec:
    """A target network with its own parameters."""
    return _spec(detached_target=False)


def _still(run: DQN) -> float:
    generator = torch.Generator().manual_seed(0)
    probe = make_batch(32, 6, generator)["obs"]
    before = run.actor_target(probe).detach().clone()
    for _ in range(20):
        run.step(make_batch(16, 6, generator))
    moved = (run.actor_target(probe) - before).norm() / (run.actor(probe) - before).norm()
    return moved.item()


def prove() -> tuple[float, float]:
    """How far the target network has come on the way of the actor after 20 updates."""
    return _still(DQN(detached_target=True)), _still(DQN(detached_target=False))
