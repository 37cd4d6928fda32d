"""PPO on a made-up environment: rollouts sampled on the device, advantages, clipped updates in shuffled minibatches."""

import torch
from torch import nn
from torch.distributions import Categorical

device = torch.device("cuda")


class Policy(nn.Module):
    def __init__(self, seen, actions, width=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class World:
    def __init__(self, count, seen):
        self.state, self.drift = torch.randn(count, seen), torch.randn(8, seen)

    def step(self, actions):
        self.state = 0.9 * self.state + 0.1 * self.drift[actions]
        return self.state, -self.state.pow(2).mean(1), torch.rand(len(actions)) < 0.05


policy = Policy(128, 8).to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
world = World(256, 128)
state = world.state.to(device)
for update in range(3):
    states, actions, logps, rewards, dones, values = [], [], [], [], [], []
    for _ in range(32):
        with torch.no_grad():
            pi, value = policy(state)
            action = pi.sample()
        after, reward, done = world.step(action.cpu())
        states.append(state)
        actions.append(action)
        logps.append(pi.log_prob(action))
        values.append(value)
        rewards.append(reward.to(device))
        dones.append(done.float().to(device))
        state = after.to(device)
    with torch.no_grad():
        last = policy(state)[1]
    advantages, running = torch.zeros(32, 256, device=device), 0.0
    for t in reversed(range(32)):
        follows = values[t + 1] if t < 31 else last
        delta = rewards[t] + 0.99 * follows * (1 - dones[t]) - values[t]
        running = delta + 0.99 * 0.95 * (1 - dones[t]) * running
        advantages[t] = running
    returns = (advantages + torch.stack(values)).flatten()
    states, actions, logps = torch.cat(states), torch.cat(actions), torch.cat(logps)
    advantages = advantages.flatten()
    for _ in range(2):
        for index in torch.randperm(len(states), device=device).split(2048):
            pi, value = policy(states[index])
            ratio = (pi.log_prob(actions[index]) - logps[index]).exp()
            a = advantages[index]
            a = (a - a.mean()) / (a.std() + 1e-8)
            loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
            loss = loss + 0.5 * (value - returns[index]).pow(2).mean() - 0.01 * pi.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        if ((ratio - 1) - ratio.log()).mean().item() > 10:
            break
    print(update, loss.item(), returns.mean().item())
